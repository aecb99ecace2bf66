"""Connects to `trainer/weights/version_server.py` and requests versions, one line of JSON at a time."""

import json
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from rollout.weights.key_directory import KEYS
from rollout.weights.verification import Deadline

MAX_LINE = 16 << 20
"""Bytes of an answer; the handle of a bucket takes a few hundred, and there may be tens of thousands."""
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Event of `poll` when the other end disconnects; on systems other than Linux it may come later."""


class SenderConnection:
    """A connection to the sender, which is kept between versions."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        """Connect, and prove to each other who is at either end if `fetch_with_keys` named a directory.

        Raises:
            OSError: the sender cannot be reached, or disconnected.
            WeightError: it has not the run's keys, or does not know ours, or a file cannot be read.
        """
        self._connection = socket.create_connection((host, port), timeout=deadline.remaining("connecting"))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._wanted = b""
        self._rest = b""
        """Bytes after the last line."""
        if directory := os.environ.get(KEYS, ""):
            try:
                self._prove(directory, deadline)
            except BaseException as error:
                self.close()
                if isinstance(error, (SettingsError, ValueError)):
                    raise WeightError(
                        f"{host}:{port} did not prove that it is the trainer of this run: {error}"
                    ) from error
                raise

    def request(self, manifest: WeightManifest, deadline: Deadline, wanted: bytes = b"") -> dict[str, Any]:
        """Request a version and return the sender's answer.

        Args:
            manifest: the version.
            deadline: of the version.
            wanted: its slices to send, see `encode_wanted`; sent if they differ from the last request's.

        Raises:
            WeightError: the sender refused, with its reason.
            OSError, ValueError: the sender disconnected, or sent no line of JSON.
        """
        request: dict[str, Any] = {
            "version": manifest.version,
            "epoch": manifest.epoch,
            "layout": layout_digest(manifest),
        }
        changed = wanted != self._wanted
        self.send(
            request | ({"slices": len(wanted)} if changed else {}), deadline, wanted if changed else b""
        )
        self._wanted = wanted
        answer = self.receive(deadline)
        if "error" in answer:
            raise WeightError(f"the sender refused version {manifest.version}: {answer['error']}")
        return answer

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """Return the sender's next line. Raises as `request`."""
        while b"\n" not in self._rest:
            self._connection.settimeout(deadline.remaining("waiting for the sender's answer"))
            part = self._connection.recv(1 << 16)
            self._rest += part
            if not part or len(self._rest) > MAX_LINE:
                raise ConnectionError("the sender disconnected or sent no line of JSON")
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("the sender sent no JSON object")
        return found

    def raw(self, nbytes: int, deadline: Deadline) -> bytes:
        """Return the next bytes, which are no line. Raises OSError or WeightError."""
        parts, missing = [self._rest[:nbytes]], nbytes - len(self._rest[:nbytes])
        self._rest = self._rest[nbytes:]
        while missing:
            self._connection.settimeout(deadline.remaining("waiting for the sender's sums"))
            part = self._connection.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionError("the sender disconnected")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def readable(self) -> bool:
        """Return whether there is something to read, or the sender has disconnected."""
        if self._rest:
            return True
        if self._connection.fileno() < 0:
            raise ConnectionError("the connection was closed")
        ready = select.poll()  # `select` cannot handle descriptors over 1023
        ready.register(self._connection, select.POLLIN)
        return bool(ready.poll(0))

    def confirm(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """Tell the sender that the whole version was received."""
        self.send({"done": manifest.version}, deadline)

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call a function from a thread of its own when the sender disconnects, or `close` does."""
        connection = self._connection.dup()  # its number is not reused before the thread has ended
        threading.Thread(
            target=_watch, args=(connection, on_hang_up), name="weights.watch", daemon=True
        ).start()

    def disconnected(self) -> bool:
        """Return whether either end has disconnected; the sender never sends without a request."""
        return self._connection.fileno() < 0 or self.readable()

    def close(self) -> None:
        """Disconnect; wakes a thread that waits for an answer."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _prove(self, directory: str, deadline: Deadline) -> None:
        try:
            from protocol.host.key_proof import ReceiverKeys  # an engine's own Python may lack what it needs
        except ModuleNotFoundError as error:
            raise WeightError(f"fetching weights with keys needs the package {error.name}") from error
        keys = ReceiverKeys(directory)
        self.send(keys.hello(), deadline)
        answer = self.receive(deadline)
        if "error" in answer:
            raise ValueError(answer["error"])
        self.send(keys.answer(answer), deadline)

    def send(self, message: dict[str, Any], deadline: Deadline, behind: bytes = b"") -> None:
        """Send a line, and what follows it. Raises OSError or WeightError."""
        self._connection.settimeout(deadline.remaining("sending to the sender"))
        self._connection.sendall(json.dumps(message).encode() + b"\n" + behind)


class SenderLine:
    """A sender's connection until a deadline, see `protocol.device.pair_store.Line`."""

    def __init__(self, connection: SenderConnection, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def send(self, message: dict[str, Any]) -> None:
        self._connection.send(message, self._deadline)

    def receive(self) -> dict[str, Any] | None:
        return self._connection.receive(self._deadline) if self._connection.readable() else None

    def raw(self, nbytes: int) -> bytes:
        """Return the next bytes, which are no line. Raises OSError or WeightError."""
        return self._connection.raw(nbytes, self._deadline)


def parse_address(address: str, location: str) -> tuple[str, int]:
    """Split "HOST:PORT", a part of `location`.

    Raises:
        WeightError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WeightError(f"location {location!r} does not begin with HOST:PORT")
    return host, int(port)


def _watch(connection: socket.socket, on_hang_up: Callable[[], None]) -> None:
    with connection:
        ready = select.poll()
        ready.register(connection, HANG_UP)
        ready.poll()
    on_hang_up()
