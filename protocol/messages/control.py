"""Defines the messages of the bus itself: hello, acknowledgement, heartbeat, and control from the trainer."""

from enum import StrEnum
from typing import Annotated

import msgspec

from protocol.messages.base import Count, Message

ShortName = Annotated[str, msgspec.Meta(max_length=256)]
"""A name that a receiver keeps for as long as the peer is connected."""


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of a connecting peer; the receiver answers with a heartbeat, which grants credit.

    A peer repeats it while it waits for acknowledgements.
    """

    sender: ShortName
    """Incarnation of the sender."""
    role: ShortName
    """Role of the sender, a `protocol.topics.Role`."""
    sent: Count = 0
    """Messages sent on this connection before this one. Those that have not arrived by then are lost, and
    count as seen."""


class Ack(Message, tag="ack", frozen=True, kw_only=True):
    """Acknowledgement: the sender may delete these messages."""

    messages: tuple[str, ...]
    """Message ids that took effect."""
    refused: dict[str, str] = {}
    """Message id -> why the receiver will never accept it."""
    credit: int = -1
    """Absolute window: the sender may have sent this many messages in total on this connection; -1:
    unchanged."""
    answers: dict[str, bytes] = {}
    """Message id -> encoded message with which the receiver answers it; these took effect, too."""


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """Sign of life of a receiver with the messages that it holds; the sender resends those not listed."""

    receiver: str
    """Incarnation of the receiver."""
    sequence: int
    """Increases with every heartbeat; one with a smaller number is out of date."""
    held: tuple[str, ...] = ()
    """Ids of this sender's messages that are being processed."""
    seen: int = 0
    """Messages received from this sender on this connection so far."""
    credit: int = -1
    """As in `Ack`."""


class Action(StrEnum):
    """Instruction of the trainer to rollout workers."""

    ABORT = "abort"  # stop generating these groups: they were dropped
    QUARANTINE = "quarantine"  # end the process of an engine that an audit refuted
    TURN = "turn"  # read in the registry whose turn it is on the GPU that trainer and engine share


class Control(Message, tag="control", frozen=True, kw_only=True):
    """Instruction of the trainer to rollout workers.

    A lost one does no harm: the ledger refuses the work that it would have stopped.
    """

    action: Action
    groups: tuple[int, ...] = ()
    """The groups to abort; empty for the others."""
    engine: str = ""
    """Incarnation of the engine whose process is to end, for QUARANTINE."""
