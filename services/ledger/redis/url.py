"""Completes URLs of ledger servers with secrets, and redacts URLs for messages."""

import re
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from protocol.errors import SettingsError

SCHEMES = ("redis", "rediss", "unix")
HOST = re.compile(r"[\w.:-]*")
DATABASE = re.compile(r"/?|/\d{1,5}")


def complete_url(url: str, password_file: str = "", ca_file: str = "") -> str:
    """Return `url` with a password and the CA certificates for the server's certificate.

    Args:
        url: URL of the server.
        password_file: file that contains the password; empty for none.
        ca_file: CA certificates in PEM format; empty for none.

    Raises:
        SettingsError: a file cannot be read or does not fit the URL. No message contains a password.
    """
    try:
        parts = urlsplit(url)
        password_in_url = parts.password
    except ValueError:
        raise refused_url(url) from None
    if password_file:
        if password_in_url is not None:
            raise SettingsError(
                "setting ledger.password_file: the ledger's URL holds a password, too; give one of them"
            )
        user, _, host = parts.netloc.rpartition("@")
        parts = parts._replace(netloc=f"{user}:{quote(_secret(password_file), safe='')}@{host}")
    if ca_file:
        if parts.scheme != "rediss":
            raise SettingsError(f"setting ledger.ca_file: {redacted(url)} is not a rediss:// URL")
        if not Path(ca_file).is_file():
            raise SettingsError(f"setting ledger.ca_file: {ca_file} is not a file")
        query = f"ssl_ca_certs={quote(str(Path(ca_file).absolute()), safe='/')}"
        parts = parts._replace(query=f"{parts.query}&{query}" if parts.query else query)
    return urlunsplit(parts)


def redacted(url: str) -> str:
    """Return scheme, host, port and database of `url`, for messages.

    Everything else is omitted, since it may contain a misplaced password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "***"
    if parts.scheme not in SCHEMES:
        return "***"
    if not HOST.fullmatch(host):
        return f"{parts.scheme}://***"
    secret = "***@" if "@" in parts.netloc else ""
    address = f"[{host}]" if ":" in host else host
    database = parts.path if DATABASE.fullmatch(parts.path) else ""
    return f"{parts.scheme}://{secret}{address}{'' if port is None else f':{port}'}{database}"


def has_database(url: str) -> bool:
    """Return whether the path of `url` is empty or the number of a database.

    redis-py would read `/name` as database 0, and `/1/2` as database 12.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "unix" or DATABASE.fullmatch(parts.path.rstrip("/")) is not None


def refused_url(url: str) -> SettingsError:
    """Return the error for an unusable URL."""
    return SettingsError(
        f"ledger URL {redacted(url)} cannot be used; write redis://USER:PASSWORD@HOST:PORT/0 "
        "(user and password may be left out), rediss:// for TLS; "
        "in user and password write special characters as %XX"
    )


def _secret(path: str) -> str:
    """Return the stripped password in a file. Only its owner may have access to the file."""
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"setting ledger.password_file: {path} cannot be read ({type(error).__name__})"
        ) from None
    if mode & 0o077:
        raise SettingsError(
            f"setting ledger.password_file: {path} can be read by other users (mode {mode & 0o777:o}); "
            "chmod 600 it"
        )
    if not text:
        raise SettingsError(f"setting ledger.password_file: {path} is empty")
    return text
