"""Defines every edge of the bus as data.

    prompts -> rollout --rollouts--> reward --scored--> ingest ==spool==> trainer --weights--> rollout
    rollout --calls--> ingest, whose acknowledgements answer

One side of an edge binds a ROUTER socket and registers its endpoint in the ledger under the topic's name: the
receiver of a `DELIVER` edge, the sender of a `BROADCAST` edge. The other side connects a DEALER socket.
"""

from dataclasses import dataclass
from enum import StrEnum

from protocol.messages import (
    Call,
    Control,
    Message,
    Recall,
    Rollout,
    ScoredRollout,
    ScoreFailure,
    WeightApplied,
    WeightDraft,
    WeightFailed,
    WeightManifest,
    WeightStaged,
)


class Role(StrEnum):
    """Services of a run."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    INGEST = "ingest"
    TRAINER = "trainer"
    MONITOR = "monitor"
    TRACKING = "tracking"
    EVALUATION = "evaluation"


class Pattern(StrEnum):
    """Delivery guarantee of an edge."""

    DELIVER = "deliver"  # to one receiver; messages are acknowledged, resent and deduplicated
    BROADCAST = "broadcast"  # newest message to every connected peer; the ledger has missed messages


@dataclass(frozen=True, slots=True)
class Topic:
    """One edge of the bus."""

    name: str
    sender: Role
    receiver: Role
    pattern: Pattern
    carries: tuple[type[Message], ...]
    """Message types in the direction of the edge."""
    answers: tuple[type[Message], ...] = ()
    """Message types in the other direction, besides acknowledgements and heartbeats."""
    window: int = 0
    """Number of messages that one receiver processes at a time, granted as credit; 0: rule F already bounds
    the messages in flight."""


ROLLOUTS = Topic(
    "rollouts",
    Role.ROLLOUT,
    Role.REWARD,
    pattern=Pattern.DELIVER,
    carries=(Rollout,),
    window=16,
)
SCORED = Topic(
    "scored",
    Role.REWARD,
    Role.INGEST,
    pattern=Pattern.DELIVER,
    carries=(ScoredRollout, ScoreFailure),
)
WEIGHTS = Topic(
    "weights",
    Role.TRAINER,
    Role.ROLLOUT,
    pattern=Pattern.BROADCAST,
    carries=(WeightManifest, WeightDraft, Control),
    answers=(WeightStaged, WeightApplied, WeightFailed),
)
CALLS = Topic(
    "calls",
    Role.ROLLOUT,
    Role.INGEST,
    pattern=Pattern.DELIVER,
    carries=(Call, Recall),
)

TOPICS: dict[str, Topic] = {topic.name: topic for topic in (ROLLOUTS, SCORED, WEIGHTS, CALLS)}
