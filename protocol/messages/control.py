"""Messages of the bus itself: hello, acknowledgement, heartbeat, and control from the trainer."""

from enum import StrEnum

from protocol.messages.base import Message


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a connecting peer, answered by a heartbeat, which grants credit; again while a peer
    waits for acknowledgements."""

    sender: str
    """Incarnation of the sender."""
    role: str
    sent: int = 0
    """Messages sent on this connection before this one: what has not arrived by now is lost, and counts as
    seen."""


class Ack(Message, tag="ack", frozen=True, kw_only=True):
    """The receiver is done with these messages: the sender may forget them."""

    messages: tuple[str, ...]
    """Message ids that took effect."""
    refused: dict[str, str] = {}
    """Message id -> why it was refused for good."""
    credit: int = -1
    """Absolute window: the sender may have sent this many messages in total on this connection; -1 leaves it
    as it is."""


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """The receiver lives, and this is what it holds. A message that it does not name is to be sent again."""

    receiver: str
    """Incarnation of the receiver."""
    sequence: int
    """Counts up; a smaller one is out of date."""
    held: tuple[str, ...] = ()
    """Ids of this sender's messages that are being worked on."""
    seen: int = 0
    """Messages received from this sender on this connection so far."""
    credit: int = -1
    """As in `Ack`."""


class Action(StrEnum):
    """What the trainer asks of rollout workers."""

    ABORT = "abort"  # stop generating these groups: they were dropped
    TURN = "turn"  # look into the registry whose turn it is on the device that trainer and engine share


class Control(Message, tag="control", frozen=True, kw_only=True):
    """An instruction of the trainer to rollout workers. Lost ones do no harm: the ledger refuses what they
    would have stopped."""

    action: Action
    groups: tuple[int, ...] = ()
