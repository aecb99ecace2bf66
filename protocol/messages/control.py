"""Defines the messages of the bus itself: hello, acknowledgement, heartbeat, and control by the trainer."""

from enum import StrEnum
from typing import Annotated

import msgspec

from protocol.messages.base import Count, Message

ShortName = Annotated[str, msgspec.Meta(max_length=256)]
"""Name that a receiver stores while the peer is connected."""


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a connecting peer. The receiver answers with a heartbeat, which grants credit.

    The peer sends the message again while it waits for acknowledgements.
    """

    sender: ShortName
    """Incarnation of the sender."""
    role: ShortName
    """Role of the sender, a `protocol.topics.Role`."""
    sent: Count = 0
    """Messages sent on this connection before this message. The receiver counts missing messages among them
    as lost and seen."""


class Ack(Message, tag="ack", frozen=True, kw_only=True):
    """Acknowledgement of messages, which the sender may then delete."""

    messages: tuple[str, ...]
    """Ids of the messages that took effect."""
    refused: dict[str, str] = {}
    """Message id -> why the receiver will never accept it."""
    credit: int = -1
    """Absolute window: number of messages that the sender may send on this connection in total; -1:
    unchanged."""
    answers: dict[str, bytes] = {}
    """Message id -> encoded reply of the receiver. These messages took effect, too."""


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """Sign of life of a receiver, with the messages that it holds. The sender resends all other messages."""

    receiver: str
    """Incarnation of the receiver."""
    sequence: int
    """Increases with every heartbeat; a smaller number is out of date."""
    held: tuple[str, ...] = ()
    """Ids of the sender's messages that the receiver is processing."""
    seen: int = 0
    """Messages received from this sender on this connection so far."""
    credit: int = -1
    """Absolute window, as in `Ack.credit`."""


class Action(StrEnum):
    """Instruction of the trainer to rollout workers."""

    ABORT = "abort"  # stop generating groups that were dropped
    QUARANTINE = "quarantine"  # end the process of an engine that failed an audit
    TURN = "turn"  # read in the registry who may use the GPU that trainer and engine share


class Control(Message, tag="control", frozen=True, kw_only=True):
    """Instruction of the trainer to rollout workers.

    Losing the message is harmless: the ledger refuses the results of the work that should have stopped.
    """

    action: Action
    groups: tuple[int, ...] = ()
    """Groups to abort; empty for other actions."""
    engine: str = ""
    """QUARANTINE: incarnation of the engine to end."""
