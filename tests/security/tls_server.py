"""A real redis-server that speaks TLS only and knows one user by an ACL file, with certificates made for
it."""

import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USER, PASSWORD = "tether", "s3cr3t-Pa55-w0rd/with@signs"
ENCODED = "s3cr3t-Pa55-w0rd%2Fwith%40signs"
CORE = "Pa55-w0rd"
"""The part of the password that is the same in every encoding."""
START_S = 30.0


@dataclass(frozen=True)
class TlsServer:
    """Where it listens, and whom it trusts."""

    port: int
    ca: Path
    other_ca: Path
    """Certificates that did not sign the server's."""

    @property
    def url(self) -> str:
        return f"rediss://{USER}:{ENCODED}@127.0.0.1:{self.port}/0"

    @property
    def bare_url(self) -> str:
        """Without the password."""
        return f"rediss://{USER}@127.0.0.1:{self.port}/0"


@contextmanager
def tls_server(directory: Path) -> Iterator[TlsServer]:
    """Start the server; it is ended with the block."""
    binary = shutil.which("redis-server")
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed")
        pytest.skip("redis-server is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    ca = certificates(directory)
    certificates(directory / "other")
    (directory / "users.acl").write_text(
        f"user default off\nuser {USER} on >{PASSWORD} ~{{tether:*}}* -@all +@read +@write +@scripting "
        "+@connection +@stream +info +time +config|get\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (directory / "redis.conf").write_text(
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ntls-cert-file server.crt\ntls-key-file server.pem\n"
        "tls-ca-cert-file ca.crt\n"
        "tls-auth-clients no\naclfile users.acl\nappendonly yes\nappendfsync always\nmaxmemory-policy "
        'noeviction\nsave ""\n'
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([binary, "redis.conf"], cwd=directory, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while b"Ready to accept" not in (directory / "log").read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"redis-server with TLS: {(directory / 'log').read_text()[-500:]}")
        yield TlsServer(port, ca, directory / "other" / "ca.crt")
    finally:
        process.terminate()
        process.wait(20)


def certificates(directory: Path) -> Path:
    """A certificate authority and a server certificate for 127.0.0.1 in `directory`; the path of the
    former."""
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tether test authority")])
    ca = _certificate(name, name, ca_key, ca_key, x509.BasicConstraints(ca=True, path_length=0))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    server = _certificate(own, name, key, ca_key, names)
    (directory / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (directory / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    (directory / "server.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return directory / "ca.crt"


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    critical = isinstance(extension, x509.BasicConstraints)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=2)
    )
    return builder.add_extension(extension, critical=critical).sign(signer, hashes.SHA256())
