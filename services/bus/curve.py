"""Creates CURVE keys, configures sockets with them, and authorizes connecting keys.

`protocol/host/curve_keys.py` documents the files.
"""

import contextlib
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from protocol.errors import SettingsError
from protocol.host.atomic_file import directory_written_aside
from protocol.host.curve_keys import load_authorized, load_pair, load_public
from services.bus.pump import Pump
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tether"
AUTHORIZED = "authorized/client.key"
KEY_FILES = ("server.key_secret", "server.key", "client.key_secret", "client.key", AUTHORIZED)
"""Key files in the order of installation; the last file marks a complete set."""
NEW_KEYS_DIR = ".made"
"""Subdirectory with new keys until all of them are installed."""


def create_keys(directory: str | Path) -> None:
    """Create a server and a client key pair in `directory`, and authorize the client.

    Only their owner can read the secret keys. The next call completes an interrupted one.

    Raises:
        SettingsError: keys exist already; replacing them would lock out running peers.
    """
    root = Path(directory)
    keys = root / NEW_KEYS_DIR
    if not keys.is_dir():
        existing = [name for name in ("server.key", "client.key") if (root / name).exists()]
        if existing:
            raise SettingsError(
                f"{root}: {existing[0]} exists; use an empty directory or delete the old keys"
            )
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        with directory_written_aside(keys) as draft:
            _make_pairs(draft)
    (root / AUTHORIZED).parent.mkdir(mode=0o700, exist_ok=True)
    for name in KEY_FILES:
        with contextlib.suppress(FileNotFoundError):  # installed already
            os.replace(keys / name, root / name)
    shutil.rmtree(keys)


def _make_pairs(directory: Path) -> None:
    for name in ("server", "client"):
        _, secret = zmq.auth.create_certificates(directory, name)
        os.chmod(secret, 0o600)
    (directory / AUTHORIZED).parent.mkdir(mode=0o700)
    shutil.copyfile(directory / "client.key", directory / AUTHORIZED)


def secure_server(socket: zmq.Socket[bytes], directory: str) -> None:
    """Require CURVE on a socket. Call before the socket binds."""
    socket.curve_publickey, socket.curve_secretkey = load_pair(directory, "server")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys of a connecting socket."""

    public: bytes
    """Public key of this machine, Z85."""
    secret: bytes = field(repr=False)
    """Secret key of this machine, Z85."""
    server: bytes
    """Public key of the binding side, Z85."""

    @classmethod
    def load(cls, directory: str | Path) -> "ClientKeys":
        """Read the client's key pair and the server's public key from a directory.

        Raises:
            SettingsError: a file is missing or contains no key.
        """
        public, secret = load_pair(directory, "client")
        return cls(public, secret, load_public(directory))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a socket. Call before the socket connects."""
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
            self.public,
            self.secret,
            self.server,
        )


class Authenticator:
    """ZAP handler (RFC 27) that authorizes the keys of peers for all sockets of a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str, stats: BusStats) -> None:
        self._directory = directory
        self._stats = stats
        self._keys = load_authorized(directory)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)
        self._pump = Pump(self._socket, self._answer)

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._pump.close()
        self._socket.close(0)

    def _answer(self) -> None:
        request = self._socket.recv_multipart(zmq.NOBLOCK)
        request_id = request[1] if len(request) > 1 else b""
        is_authorized = (
            len(request) == 7 and request[5] == b"CURVE" and self._is_authorized(z85.encode(request[6]))
        )
        if not is_authorized:
            self._stats.unknown_peer += 1
            log.info(
                "bus.unauthorized address=%s",
                request[3].decode(errors="replace") if len(request) > 3 else "?",
            )
        status = (b"200", b"OK") if is_authorized else (b"400", b"key is not in authorized/")
        self._socket.send_multipart([b"1.0", request_id, *status, b"", b""], zmq.NOBLOCK)
        self._pump.poke()

    def _is_authorized(self, key: bytes) -> bool:
        if key not in self._keys:
            self._keys = load_authorized(self._directory)
        return key in self._keys
