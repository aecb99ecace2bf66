"""The receiving end of `trainer/weights/version_server.py`: asks for a version, a line of JSON at a time, on
a connection that stays."""

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
"""Bytes of an answer: a handle for each bucket is a few hundred."""
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""What `poll` calls it when the other end has hung up; elsewhere than on Linux it may notice later."""


class SenderConnection:
    """A connection to the sender."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        """Connect. Raises OSError or WeightError."""
        self._connection = socket.create_connection((host, port), timeout=deadline.remaining("connecting"))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def ask(self, manifest: WeightManifest, deadline: Deadline) -> dict[str, Any]:
        """Ask for a version.

        Raises:
            WeightError: the sender refused; says why.
            OSError, ValueError: it has hung up, or does not speak our protocol.
        """
        self._tell(
            {"version": manifest.version, "epoch": manifest.epoch, "layout": layout_digest(manifest)},
            deadline,
        )
        answer = b""
        while not answer.endswith(b"\n"):
            self._connection.settimeout(deadline.remaining("waiting for the sender's answer"))
            part = self._connection.recv(1 << 16)
            answer += part
            if not part or len(answer) > MAX_LINE:
                raise ConnectionError(
                    f"the sender of version {manifest.version} hung up or does not speak our protocol"
                )
        found = json.loads(answer)
        if not isinstance(found, dict) or "error" in found:
            detail = found.get("error") if isinstance(found, dict) else found
            raise WeightError(f"the sender refused version {manifest.version}: {detail}")
        return found

    def done(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """Say that all bytes have come."""
        self._tell({"done": manifest.version}, deadline)

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call a function from a thread of its own, which lives until then: when the sender hangs up, or
        `close` does."""
        connection = self._connection.dup()  # its number stays its own until the thread has ended
        threading.Thread(
            target=_watch, args=(connection, on_hang_up), name="weights.watch", daemon=True
        ).start()

    def hung_up(self) -> bool:
        """Whether the sender has hung up, or we have. It says nothing unasked."""
        if self._connection.fileno() < 0:
            return True
        ready = select.poll()  # `select` knows no descriptors over 1023
        ready.register(self._connection, select.POLLIN)
        return bool(ready.poll(0))

    def close(self) -> None:
        """Hang up; wakes a thread that waits for an answer."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _tell(self, words: dict[str, Any], deadline: Deadline) -> None:
        self._connection.settimeout(deadline.remaining("talking to the sender"))
        self._connection.sendall(json.dumps(words).encode() + b"\n")


def _watch(connection: socket.socket, on_hang_up: Callable[[], None]) -> None:
    with connection:
        ready = select.poll()
        ready.register(connection, HANG_UP)
        ready.poll()
    on_hang_up()


def parse_address(address: str, location: str) -> tuple[str, int]:
    """Split "HOST:PORT", a part of `location`.

    Raises:
        WeightError: if it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WeightError(f"location {location!r} does not begin with HOST:PORT")
    return host, int(port)
