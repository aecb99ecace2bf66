"""Reads requests from a receiver's connection and sends replies, one line of JSON each."""

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
"""Maximum size of a request, bytes."""
REFUSED = {"error": "this trainer sends weights to holders of a key of its run only (bus.curve_dir)"}
"""Reply to a receiver without an authorized key."""


class ReceiverConnection(LineConnection):
    """Connection to a receiver, with deadlines on the clock of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "a receiver", MAX_LINE)
        self.wanted = b""
        """Last requested slices, as `protocol.weights.slices.encode_wanted`."""
        self.keeps = False
        """Whether the receiver still has its last confirmed version, except for discarded tensors."""

    def request(self, end: float, *, slices: bool = True) -> dict[str, Any] | None:
        """Read the next line; None if the receiver disconnected before the line began.

        Args:
            end: deadline for the complete line, on the clock of time.monotonic.
            slices: whether to read announced slices after the line, into `wanted`.

        Raises:
            TimeoutError: the line is incomplete at `end`.
            OSError, ValueError: the line is not JSON.
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
        """Verify that the receiver has an authorized key; otherwise reply only with `REFUSED`.

        Raises:
            OSError, ValueError: the receiver disconnected, sent no JSON, or was silent until `end`.
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
        """Return the connection with the deadline `end`."""
        return TimedLine(self, partial(remaining_s, end))

    def wait_done(self, version: int, end: float) -> None:
        """Wait for the receiver's {"done": version}.

        Raises:
            ValueError: the receiver disconnected, or sent something else.
        """
        if self.request(end) != {"done": version}:
            raise ValueError(f"a receiver disconnected in the middle of version {version}")


def remaining_s(end: float) -> float:
    """Return the seconds until `end`. Raises TimeoutError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return seconds
