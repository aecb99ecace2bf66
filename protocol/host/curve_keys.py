"""Reads the bus's CURVE keys, which also authorize fetching weights.

A directory DIR holds the keys of one machine. Public keys end in .key, secret keys in .key_secret:

- DIR/server.key, DIR/server.key_secret: key pair of every socket that binds. Machines with binding sockets
  need the secret key; machines with connecting sockets need the public key.
- DIR/client.key, DIR/client.key_secret: key pair of this machine's connecting sockets.
- DIR/authorized/*.key: public keys that may connect. Machines with binding sockets need this directory; it is
  read again when an unknown key appears.
"""

import logging
import shlex
import struct
from pathlib import Path

import zmq.auth
from zmq.utils import z85

from protocol.errors import SettingsError

log = logging.getLogger(__name__)

KEY_BYTES = 32


def load_pair(directory: str | Path, name: str) -> tuple[bytes, bytes]:
    """Return the public and secret key of the pair `name` ("server" or "client"), as Z85 text.

    Raises:
        SettingsError: the file is missing, holds no secret key, or is readable by other users.
    """
    path = Path(directory) / f"{name}.key_secret"
    public, secret = _load(path, directory)
    if secret is None:
        raise SettingsError(f"bus.curve_dir: {path} holds no secret key")
    mode = path.stat().st_mode
    if mode & 0o077:
        raise SettingsError(
            f"bus.curve_dir: {path} can be read by other users (mode {mode & 0o777:o}); "
            "chmod 600 it, or make new keys"
        )
    return public, secret


def load_public(directory: str | Path) -> bytes:
    """Return the server's public key, as Z85 text.

    Raises:
        SettingsError: the file is missing or holds no key.
    """
    return _load(Path(directory) / "server.key", directory)[0]


def load_authorized(directory: str | Path) -> frozenset[bytes]:
    """Return the public keys that may connect, as Z85 text. Files without a key are skipped and logged."""
    keys: set[bytes] = set()
    for path in sorted((Path(directory) / "authorized").glob("*.key")):
        try:
            keys.add(_read(path)[0])
        except (OSError, ValueError) as error:
            log.warning("bus.bad_key file=%s error=%s", path.name, error)
    return frozenset(keys)


def _load(path: Path, directory: str | Path) -> tuple[bytes, bytes | None]:
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"bus.curve_dir: cannot read {path} ({error}); "
            f"make keys with `tether keys {shlex.quote(str(directory))}`"
        ) from error


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key and the secret key (or None) of a file. Raises OSError or ValueError."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        valid = all(len(z85.decode(key)) == KEY_BYTES for key in (public, secret) if key is not None)
    except (LookupError, struct.error):  # invalid characters or length for Z85
        valid = False
    if not valid:
        raise ValueError("the file has a key that is not 40 characters of Z85")
    return public, secret
