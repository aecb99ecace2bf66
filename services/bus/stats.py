"""Counts messages and bytes of a sender, receiver, broadcaster or listener."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class BusStats:
    """Counters of one end of an edge since its creation.

    Messages of the bus itself (hello, ack, heartbeat) count only as bytes.
    """

    sent: int = 0
    """Number of messages passed to a socket, without resends."""
    received: int = 0
    """Number of messages put into the inbox."""
    resent: int = 0
    """Number of resends passed to a socket."""
    acked: int = 0
    """Number of messages acknowledged, by this receiver or to this sender."""
    refused: int = 0
    """Number of messages permanently refused, by this receiver or to this sender."""
    duplicates: int = 0
    """Number of received messages that had been received before."""
    malformed: int = 0
    """Number of frames that are not a message of this run and topic."""
    unknown_peer: int = 0
    """Number of frames from peers without a hello, and of refused connections: without authorized keys,
    without keys, or not ZeroMQ."""
    dropped_full: int = 0
    """Number of messages dropped: a queue was full, a credit was exceeded, or a broadcast was too large."""
    bytes_in: int = 0
    """Bytes of received frames."""
    bytes_out: int = 0
    """Bytes of frames passed to a socket."""

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)
