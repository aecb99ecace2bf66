"""Makes and reads CURVE keys, and answers which keys may connect.

A directory DIR holds the keys of one machine; public keys end in .key, secret ones in .key_secret:

- DIR/server.key, DIR/server.key_secret: pair of every socket that binds. The secret is needed where sockets
  bind, the public key where sockets connect.
- DIR/client.key, DIR/client.key_secret: pair of this machine's connecting sockets; needed where they are.
- DIR/authorized/*.key: public keys that may connect; needed where sockets bind, and read again when an
  unknown key appears.
"""

import logging
import os
import shutil
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from protocol.errors import SettingsError
from services.bus.pump import Pump
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tether"
KEY_BYTES = 32


def create_keys(directory: str | Path) -> None:
    """Make a server and a client key pair in `directory`, and authorize the client.

    The secret keys are readable by their owner only.

    Raises:
        SettingsError: if there are keys already: replacing them would lock out running peers.
    """
    root = Path(directory)
    taken = [name for name in ("server.key", "client.key") if (root / name).exists()]
    if taken:
        raise SettingsError(f"{root}: {taken[0]} exists; use an empty directory or delete the old keys")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    (root / "authorized").mkdir(mode=0o700, exist_ok=True)
    for name in ("server", "client"):
        _, secret = zmq.auth.create_certificates(root, name)
        os.chmod(secret, 0o600)
    shutil.copyfile(root / "client.key", root / "authorized" / "client.key")


def load_pair(directory: str | Path, name: str) -> tuple[bytes, bytes]:
    """Return public and secret key of the pair `name` ("server" or "client"), as Z85 text.

    Raises:
        SettingsError: if the file is missing, holds no secret key, or can be read by others than its owner.
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


def load_public(directory: str | Path, name: str) -> bytes:
    """Return public key `name` ("server" or "client"), as Z85 text.

    Raises:
        SettingsError: if the file is missing or holds no key.
    """
    return _load(Path(directory) / f"{name}.key", directory)[0]


def _load(path: Path, directory: str | Path) -> tuple[bytes, bytes | None]:
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"bus.curve_dir: cannot read {path} ({error}); make keys with `tether keys {directory}`"
        ) from error


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public and, if there is one, the secret key of a file. Raises OSError or ValueError."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        valid = all(len(z85.decode(key)) == KEY_BYTES for key in (public, secret) if key is not None)
    except (LookupError, struct.error):  # other characters than Z85, or another length
        valid = False
    if not valid:
        raise ValueError("it holds a key that is not 40 characters of Z85")
    return public, secret


def load_authorized(directory: str | Path) -> frozenset[bytes]:
    """Return the public keys that may connect, as Z85 text. Files without a key are skipped and logged."""
    keys: set[bytes] = set()
    for path in sorted((Path(directory) / "authorized").glob("*.key")):
        try:
            keys.add(_read(path)[0])
        except (OSError, ValueError) as error:
            log.warning("bus.bad_key file=%s error=%s", path.name, error)
    return frozenset(keys)


def secure_server(socket: zmq.Socket[bytes], directory: str) -> None:
    """Require CURVE on a socket, before it binds."""
    socket.curve_publickey, socket.curve_secretkey = load_pair(directory, "server")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys that a connecting socket needs."""

    public: bytes
    """This machine's public key, Z85."""
    secret: bytes = field(repr=False)
    """Its secret part, Z85."""
    server: bytes
    """Public key of the binding side, Z85."""

    @classmethod
    def load(cls, directory: str | Path) -> "ClientKeys":
        """Read the client's pair and the server's public key from a directory.

        Raises:
            SettingsError: if a file is missing or holds no key.
        """
        public, secret = load_pair(directory, "client")
        return cls(public, secret, load_public(directory, "server"))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a socket, before it connects."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
            self.public,
            self.secret,
            self.server,
        )


class Authenticator:
    """ZAP handler (RFC 27): decides for all sockets of one context whether a key may connect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str, stats: BusStats) -> None:
        self._directory = directory
        self._stats = stats
        self._keys = load_authorized(directory)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._pump = Pump(self._socket, self._answer)

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._pump.close()
        self._socket.close(0)

    def _answer(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        request_id = request[1] if len(request) > 1 else b""
        allowed = len(request) == 7 and request[5] == b"CURVE" and self._is_authorized(z85.encode(request[6]))
        if not allowed:
            self._stats.unknown_peer += 1
            log.info(
                "bus.unauthorized address=%s",
                request[3].decode(errors="replace") if len(request) > 3 else "?",
            )
        status = (b"200", b"OK") if allowed else (b"400", b"key is not in authorized/")
        self._socket.send_multipart([b"1.0", request_id, *status, b"", b""], zmq.NOBLOCK)
        self._pump.poke()

    def _is_authorized(self, key: bytes) -> bool:
        if key not in self._keys:
            self._keys = load_authorized(self._directory)
        return key in self._keys


def main() -> None:
    """Run `python -m services.bus.curve DIR`: make keys in DIR."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.bus.curve DIR")
    try:
        create_keys(sys.argv[1])
    except (SettingsError, OSError) as error:
        print(f"tether keys: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
