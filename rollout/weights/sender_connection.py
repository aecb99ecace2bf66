"""Connects to `trainer/weights/version_server.py` and requests versions, one line of JSON at a time."""

import json
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from rollout.weights.verification import Deadline

MAX_LINE = 1 << 20
"""Bytes of an answer; the handle of a bucket takes a few hundred."""
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""Event of `poll` when the other end disconnects; on systems other than Linux it may come later."""


class SenderConnection:
    """A connection to the sender, which is kept between versions."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        """Connect. Raises OSError or WeightError."""
        self._connection = socket.create_connection((host, port), timeout=deadline.remaining("connecting"))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._wanted = b""

    def request(self, manifest: WeightManifest, deadline: Deadline, wanted: bytes = b"") -> dict[str, Any]:
        """Request a version and return the sender's answer.

        Args:
            manifest: the version.
            deadline: of the version.
            wanted: which slices of it, see `encode_wanted`; sent if they are not those of the last request.

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
        self._send(
            request | ({"slices": len(wanted)} if changed else {}), deadline, wanted if changed else b""
        )
        self._wanted = wanted
        line = b""
        while not line.endswith(b"\n"):
            self._connection.settimeout(deadline.remaining("waiting for the sender's answer"))
            part = self._connection.recv(1 << 16)
            line += part
            if not part or len(line) > MAX_LINE:
                raise ConnectionError(
                    f"the sender of version {manifest.version} disconnected or sent no line of JSON"
                )
        answer = json.loads(line)
        if not isinstance(answer, dict) or "error" in answer:
            detail = answer.get("error") if isinstance(answer, dict) else answer
            raise WeightError(f"the sender refused version {manifest.version}: {detail}")
        return answer

    def confirm(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """Tell the sender that the whole version was received."""
        self._send({"done": manifest.version}, deadline)

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call a function from a thread of its own when the sender disconnects, or `close` does."""
        connection = self._connection.dup()  # its number is not reused before the thread has ended
        threading.Thread(
            target=_watch, args=(connection, on_hang_up), name="weights.watch", daemon=True
        ).start()

    def disconnected(self) -> bool:
        """Return whether either end has disconnected; the sender sends nothing without a request."""
        if self._connection.fileno() < 0:
            return True
        ready = select.poll()  # `select` cannot handle descriptors over 1023
        ready.register(self._connection, select.POLLIN)
        return bool(ready.poll(0))

    def close(self) -> None:
        """Disconnect; wakes a thread that waits for an answer."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, message: dict[str, Any], deadline: Deadline, behind: bytes = b"") -> None:
        self._connection.settimeout(deadline.remaining("sending to the sender"))
        self._connection.sendall(json.dumps(message).encode() + b"\n" + behind)


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
