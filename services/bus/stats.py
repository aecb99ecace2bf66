"""Counts the messages that a sender, receiver, broadcaster or listener of the bus has sent and received."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class BusStats:
    """Counters of one owner of bus sockets since it was made.

    Messages of the bus itself (hello, ack, heartbeat) count only as bytes.
    """

    sent: int = 0
    """Messages handed to a socket, resends not counted."""
    received: int = 0
    """Messages that went to the inbox."""
    resent: int = 0
    """Messages handed to a socket again."""
    acked: int = 0
    """Messages acknowledged, by this receiver or to this sender."""
    refused: int = 0
    """Messages refused for good, by this receiver or to this sender."""
    duplicates: int = 0
    """Messages that had been received before."""
    malformed: int = 0
    """Frames that were not a message of this run and topic."""
    unknown_peer: int = 0
    """Frames of peers that had not sent a hello, and refused connections: without authorized keys, without
    keys, or not ZeroMQ."""
    dropped_full: int = 0
    """Messages dropped because a queue was full, a credit was exceeded, or a frame to all was too large."""
    bytes_in: int = 0
    """Bytes of received frames."""
    bytes_out: int = 0
    """Bytes of frames handed to a socket."""

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
