"""Tests certificates of the endpoint by what OpenSSL's own clients make of them."""

import ssl
import stat
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.network.certificates import create_certificate, server_tls


def handshake(server: ssl.SSLContext, trusted: Path, name: str) -> str:
    """Return the TLS version that a client and a server agree on, in memory."""
    client = ssl.create_default_context(cafile=str(trusted))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname=name)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (asks, answers):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return asks.version() or ""


def test_a_made_certificate_is_trusted_by_its_names_alone(tmp_path: Path) -> None:
    cert_file, key_file = create_certificate(tmp_path / "keys", ["rollout.example", "127.0.0.2"])
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    context = server_tls(str(cert_file), str(key_file))
    for name in ("rollout.example", "127.0.0.2"):
        assert handshake(context, cert_file, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, cert_file, "other.example")
    with pytest.raises(SettingsError, match="exists"):
        create_certificate(tmp_path / "keys", ["rollout.example"])


def test_files_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    cert_file, key_file = create_certificate(tmp_path / "a", ["a"])
    _, other_key = create_certificate(tmp_path / "b", ["b"])
    with pytest.raises(SettingsError, match=r"endpoint.crt .*MISMATCH"):
        server_tls(str(cert_file), str(other_key))
    with pytest.raises(SettingsError, match="No such file"):
        server_tls(str(cert_file), str(tmp_path / "none.pem"))
    key_file.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        server_tls(str(cert_file), str(key_file))
    with pytest.raises(SettingsError, match="needs the names"):
        create_certificate(tmp_path / "c", [])
