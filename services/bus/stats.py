"""Counters of one bus socket owner."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class BusStats:
    """What one sender, receiver, broadcaster or listener has seen since it was made. Bus messages (hello, ack
    ...) count only as bytes."""

    sent: int = 0
    """Messages handed to a socket, resends not counted."""
    received: int = 0
    """Messages that went to the inbox."""
    resent: int = 0
    acked: int = 0
    refused: int = 0
    """Messages refused for good."""
    duplicates: int = 0
    """Messages that had been received before."""
    malformed: int = 0
    """Frames that were not a message of this run and topic."""
    unknown_peer: int = 0
    """Frames of a peer that had not said hello, and connections refused: keys that are not authorized, none
    at all, or no ZeroMQ."""
    dropped_full: int = 0
    """Messages dropped because a queue was full or a credit was exceeded."""
    bytes_in: int = 0
    bytes_out: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)
