"""Reads the certificate of an HTTP server, and creates self-signed certificates."""

import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocol.errors import SettingsError

CERT_FILE, KEY_FILE = "endpoint.crt", "endpoint.pem"
DAYS = 825
"""Validity of a created certificate, days; some clients refuse longer validity."""


def server_tls(cert_file: str, key_file: str) -> ssl.SSLContext:
    """Return the context for a server of TLS 1.2 or later.

    Raises:
        SettingsError: a file cannot be read, other users can read the key, or certificate and key do not
            match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        mode = Path(key_file).stat().st_mode
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise SettingsError(f"the certificate {cert_file} with the key {key_file}: {reason}") from None
    if mode & 0o077:
        raise SettingsError(
            f"{key_file} can be read by other users (mode {mode & 0o777:o}): chmod 600 {key_file}"
        )
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a server that starts by itself has no password for it")


def create_certificate(directory: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """Create a self-signed certificate and its key, readable by its owner only; return both paths.

    Args:
        directory: directory of both files, created if it does not exist.
        names: host names and IP addresses by which clients reach the server.

    Raises:
        SettingsError: `names` is empty or has an empty name, or a file exists.
    """
    if not names or not all(names):
        raise SettingsError("a certificate needs the names or addresses by which clients reach the server")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    _write_new(directory / KEY_FILE, secret, 0o600)
    _write_new(directory / CERT_FILE, certificate.public_bytes(pem), 0o644)
    return directory / CERT_FILE, directory / KEY_FILE


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SettingsError(f"{path} exists; use another directory, or delete the old certificate") from None
    with open(descriptor, "wb") as file:
        file.write(content)
