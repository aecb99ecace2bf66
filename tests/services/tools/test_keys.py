"""Tests `tether keys`: keys of the bus, and certificates of the endpoint."""

import ssl
from pathlib import Path

from typer.testing import CliRunner

from services.cli import app
from tests.protocol.network.test_certificates import handshake


def test_keys_command_makes_keys_of_the_bus_or_a_certificate(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["keys", str(tmp_path / "bus")])
    assert made.exit_code == 0
    assert (tmp_path / "bus/server.key_secret").is_file()
    assert not (tmp_path / "bus/endpoint.crt").exists()
    names = ["--endpoint", "rollout.example", "--endpoint", "127.0.0.2"]
    made = CliRunner().invoke(app, ["keys", str(tmp_path / "tls"), *names])
    cert_file, key_file = tmp_path / "tls/endpoint.crt", tmp_path / "tls/endpoint.pem"
    assert f"environment.cert_file to {cert_file} and environment.key_file to {key_file}" in made.output
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    assert handshake(context, cert_file, "127.0.0.2") == "TLSv1.3"
