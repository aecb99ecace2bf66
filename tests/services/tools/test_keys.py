"""Tests `tether keys`: keys of the bus, and certificates of the endpoint."""

import ssl
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.host.curve_keys import load_authorized
from services.cli import app
from services.tools.keys import main
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


def test_key_command_makes_keys_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["curve", str(tmp_path)])
    main()
    assert len(load_authorized(tmp_path)) == 1
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "exists" in capsys.readouterr().err
