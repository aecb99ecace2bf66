"""CURVE keys, and the check of who may connect.

DIR/server.key        public key of every socket that binds
DIR/server.key_secret its secret part; needed where sockets bind
DIR/client.key        public key of this machine's connecting sockets
DIR/client.key_secret its secret part; needed where sockets connect
DIR/authorized/*.key  public keys that may connect; needed where sockets bind, read again when an unknown key appears
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
    """Make a server and a client key pair in `directory`, readable by the owner only, and authorize the
    client.

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
    """Public and secret key `name` ("server" or "client").

    Raises:
        SettingsError: if the file is missing, holds no secret key, or others than its owner can read it.
    """
    path = Path(directory) / f"{name}.key_secret"
    public, secret = _load(path, directory)
    if secret is None:
        raise SettingsError(f"bus.curve_dir: {path} holds no secret key")
    mode = path.stat().st_mode
    if mode & 0o077:
        raise SettingsError(
            f"bus.curve_dir: {path} can be read by other users (mode {mode & 0o777:o}); chmod 600 it, or make new keys"
        )
    return public, secret


def load_public(directory: str | Path, name: str) -> bytes:
    """Public key `name`.

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
    """Public and, if there is one, secret key of a file. Raises OSError or ValueError."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        whole = all(len(z85.decode(key)) == KEY_BYTES for key in (public, secret) if key is not None)
    except (LookupError, struct.error):  # of a file that looks like keys up to there
        whole = False
    if not whole:
        raise ValueError("a key in it is not 40 characters of Z85")
    return public, secret


def load_authorized(directory: str | Path) -> frozenset[bytes]:
    """Public keys that may connect, as Z85 text. Files that hold none are skipped and logged."""
    keys: set[bytes] = set()
    for path in sorted((Path(directory) / "authorized").glob("*.key")):
        try:
            keys.add(_read(path)[0])
        except (OSError, ValueError) as error:
            log.warning("bus.bad_key file=%s error=%s", path.name, error)
    return frozenset(keys)


def secure_server(socket: zmq.Socket[bytes], directory: str) -> None:
    """Make a socket that is about to bind demand CURVE."""
    socket.curve_publickey, socket.curve_secretkey = load_pair(directory, "server")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a connecting socket needs."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    @classmethod
    def load(cls, directory: str | Path) -> "ClientKeys":
        """Read this machine's pair and the server's public key.

        Raises:
            SettingsError: if a file is missing or holds no key.
        """
        public, secret = load_pair(directory, "client")
        return cls(public, secret, load_public(directory, "server"))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is about to connect speak CURVE."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
            self.public,
            self.secret,
            self.server,
        )


class Authenticator:
    """Answers ZeroMQ's question whether a key may connect, for all sockets of one context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str, stats: BusStats) -> None:
        self._directory = directory
        self._stats = stats
        self._keys = load_authorized(directory)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
        self._pump = Pump(self._socket, self._answer)

    def close(self) -> None:
        self._pump.close()
        self._socket.close(0)

    def _answer(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        number = request[1] if len(request) > 1 else b""
        allowed = len(request) == 7 and request[5] == b"CURVE" and self._knows(z85.encode(request[6]))
        if not allowed:
            self._stats.unknown_peer += 1
            log.info(
                "bus.unauthorized address=%s",
                request[3].decode(errors="replace") if len(request) > 3 else "?",
            )
        verdict = (b"200", b"OK") if allowed else (b"400", b"key is not in authorized/")
        self._socket.send_multipart([b"1.0", number, *verdict, b"", b""], zmq.NOBLOCK)
        self._pump.poke()

    def _knows(self, key: bytes) -> bool:
        if key not in self._keys:
            self._keys = load_authorized(self._directory)
        return key in self._keys


def main() -> None:
    """`python -m services.bus.curve DIR`: make keys in DIR."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.bus.curve DIR")
    try:
        create_keys(sys.argv[1])
    except (SettingsError, OSError) as error:
        print(f"tether keys: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
