"""Defines every edge of the bus as data.

    prompts -> rollout --rollouts--> reward --scored--> ingest ==spool==> trainer --weights--> rollout
    rollout --calls--> ingest, whose acknowledgements answer

One side of an edge binds a ROUTER and registers its endpoint in the ledger under the topic's name: the
receiver of what is delivered, the sender of what is broadcast. The other connects a DEALER.
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
    """The services of a run."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    INGEST = "ingest"
    TRAINER = "trainer"
    MONITOR = "monitor"
    TRACKING = "tracking"
    EVALUATION = "evaluation"


class Pattern(StrEnum):
    """Delivery guarantee of an edge."""

    DELIVER = "deliver"  # each message to one receiver, acknowledged, resent, deduplicated
    BROADCAST = "broadcast"  # the newest to every connected peer; a peer finds what it missed in the ledger


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
    """Messages that one receiver processes at a time, granted as credit; 0 where rule F already bounds the
    messages in flight."""


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
