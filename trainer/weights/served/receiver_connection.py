"""Reads requests from a receiver's connection and answers them, one line of JSON at a time."""

import logging
import socket
import time
from functools import partial
from typing import Any

from protocol.host.key_proof import SenderKeys, proves
from protocol.host.line_connection import LineConnection, TimedLine
from protocol.weights.slices import MAX_WANTED_BYTES

log = logging.getLogger("tether.weights")

MAX_LINE = 4096
"""Bytes of a request."""
REFUSED = {"error": "this trainer sends weights to holders of a key of its run only (bus.curve_dir)"}
"""Answer to a receiver without one."""


class ReceiverConnection(LineConnection):
    """A receiver's connection, whose waits end at a time of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "a receiver", MAX_LINE)
        self.wanted = b""
        """The slices that the receiver asked for last, see `protocol.weights.slices.encode_wanted`."""
        self.keeps = False
        """Whether the receiver still has the version that it confirmed last, but for what it forgets."""

    def request(self, end: float, *, slices: bool = True) -> dict[str, Any] | None:
        """Read the next line; None if the receiver disconnected before it began one.

        Args:
            end: time.monotonic() by which it has to be complete.
            slices: read what follows a line that announces it, see `wanted`.

        Raises:
            TimeoutError: it is not complete by `end`.
            OSError, ValueError: it is not a line of JSON.
        """
        remaining = partial(remaining_s, end)
        request = self.receive(remaining)
        if slices and request and "slices" in request:
            nbytes = request["slices"]
            if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_WANTED_BYTES:
                raise ValueError(f"a receiver announced {nbytes} bytes of slices")
            self.wanted = self.raw(nbytes, remaining)
        return request

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
            log.warning("weights.unauthorized address=%s error=%s", self.socket.getpeername()[0], error)
            self.answer(REFUSED, end)
            return False
        return True

    def answer(self, answer: dict[str, Any], end: float) -> None:
        """Send a line of JSON."""
        self.send(answer, partial(remaining_s, end))

    def line(self, end: float) -> TimedLine:
        """Return the connection until `end`."""
        return TimedLine(self, partial(remaining_s, end))

    def wait_done(self, version: int, end: float) -> None:
        """Wait for the receiver's {"done": version}.

        Raises:
            ValueError: it disconnected, or sent something else.
        """
        if self.request(end) != {"done": version}:
            raise ValueError(f"a receiver disconnected in the middle of version {version}")


def remaining_s(end: float) -> float:
    """Return the seconds until `end`. Raises TimeoutError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return seconds
