"""Reads requests from a receiver's connection and answers them, one line of JSON at a time."""

import json
import logging
import select
import socket
import time
from contextlib import suppress
from typing import Any

from protocol.host.key_proof import SenderKeys, proves
from protocol.weights.slices import MAX_WANTED_BYTES

log = logging.getLogger("tether.weights")

MAX_LINE = 4096
"""Bytes of a request."""
REFUSED = {"error": "this trainer sends weights to holders of a key of its run only (bus.curve_dir)"}
"""Answer to a receiver without one."""


class ReceiverConnection:
    """A receiver's connection, which carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        """Bytes after the last line: a receiver may send the next request right behind {"done": v}."""
        self.wanted = b""
        """The slices that the receiver asked for last, see `protocol.weights.slices.encode_wanted`."""

    def request(self, end: float, *, slices: bool = True) -> dict[str, Any] | None:
        """Read the next line; None if the receiver disconnected before it began one.

        Args:
            end: time.monotonic() by which it has to be complete.
            slices: read what follows a line that announces it, see `wanted`.

        Raises:
            TimeoutError: it is not complete by `end`.
            ValueError: it is not a line of JSON.
        """
        while b"\n" not in self._rest:
            self.connection.settimeout(remaining_s(end))
            part = self.connection.recv(MAX_LINE)
            self._rest += part
            if not self._rest:
                return None
            if not part or len(self._rest) > MAX_LINE:
                raise ValueError("a receiver disconnected within a request, or sent no line of JSON")
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict):
            return {}
        if slices and "slices" in found:
            self.wanted = self._raw(found["slices"], end)
        return found

    def admit(self, keys: SenderKeys, end: float) -> bool:
        """Have the receiver prove that it has an authorized key; answer it no more than that if it has none.

        Raises:
            OSError, ValueError: it disconnected, sent no JSON, or was silent until `end`.
        """
        try:
            challenge = keys.challenge(self.request(end, slices=False) or {})
            self.answer(challenge.answer, end)
            if not proves(self.request(end, slices=False) or {}, challenge.expected):
                raise ValueError("its proof is wrong")
        except ValueError as error:
            log.warning("weights.unauthorized address=%s error=%s", self.connection.getpeername()[0], error)
            self.answer(REFUSED, end)
            return False
        return True

    def _raw(self, nbytes: object, end: float) -> bytes:
        """Read the bytes that follow a line. Raises as `request`."""
        if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_WANTED_BYTES:
            raise ValueError(f"a receiver announced {nbytes} bytes of slices")
        while len(self._rest) < nbytes:
            self.connection.settimeout(remaining_s(end))
            part = self.connection.recv(min(nbytes - len(self._rest), 1 << 16))
            if not part:
                raise ValueError("a receiver disconnected within a request")
            self._rest += part
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return found

    def answer(self, answer: dict[str, Any], end: float) -> None:
        """Send a line of JSON."""
        self.send(json.dumps(answer).encode() + b"\n", end)

    def send(self, data: bytes, end: float) -> None:
        """Send bytes."""
        self.connection.settimeout(remaining_s(end))
        self.connection.sendall(data)

    def wait_done(self, version: int, end: float) -> None:
        """Wait for the receiver's {"done": version}.

        Raises:
            ValueError: it disconnected, or sent something else.
        """
        if self.request(end) != {"done": version}:
            raise ValueError(f"a receiver disconnected in the middle of version {version}")

    def shut_down(self) -> None:
        """Disconnect at once, which also wakes threads that wait on the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def readable(self, seconds: float) -> bool:
        """Return whether there is something to read, or the receiver disconnects, within `seconds`."""
        if self._rest:
            return True
        ready = select.poll()  # `select` cannot handle descriptors over 1023
        ready.register(self.connection, select.POLLIN)
        return bool(ready.poll(1e3 * seconds))

    def disconnected(self, seconds: float) -> bool:
        """Return whether the receiver disconnects within `seconds`, with all bytes read."""
        return self.readable(seconds) and not self._rest and not self.connection.recv(1, socket.MSG_PEEK)


class ConnectionLine:
    """A receiver's connection until a deadline, see `protocol.device.pair_store.Line`."""

    def __init__(self, connection: ReceiverConnection, end: float) -> None:
        self._connection = connection
        self._end = end

    def send(self, message: dict[str, Any]) -> None:
        self._connection.answer(message, self._end)

    def receive(self) -> dict[str, Any] | None:
        if not self._connection.readable(0):
            return None
        message = self._connection.request(self._end)
        if message is None:
            raise ConnectionError("a receiver disconnected before it had joined the group")
        return message


def remaining_s(end: float) -> float:
    """Return the seconds until `end`. Raises TimeoutError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return seconds
