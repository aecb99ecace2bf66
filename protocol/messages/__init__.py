"""Defines every message of the bus. `AnyMessage` is the union of the messages that a frame may contain."""

from protocol.messages.base import Message
from protocol.messages.call import Call, Recall, Recalled
from protocol.messages.control import Ack, Action, Control, Heartbeat, Hello
from protocol.messages.step import Mismatch, StepReport
from protocol.messages.trajectory import UNKNOWN_EXPERT, Remark, Rollout, ScoredRollout, ScoreFailure
from protocol.messages.weights import (
    TensorEntry,
    WeightApplied,
    WeightDraft,
    WeightFailed,
    WeightLink,
    WeightManifest,
    WeightPart,
    WeightPiece,
    WeightStaged,
)

AnyMessage = (
    Rollout
    | ScoredRollout
    | ScoreFailure
    | StepReport
    | WeightManifest
    | WeightDraft
    | WeightStaged
    | WeightApplied
    | WeightFailed
    | Hello
    | Ack
    | Heartbeat
    | Control
    | Call
    | Recall
    | Recalled
)

__all__ = [
    "UNKNOWN_EXPERT",
    "Ack",
    "Action",
    "AnyMessage",
    "Call",
    "Control",
    "Heartbeat",
    "Hello",
    "Message",
    "Mismatch",
    "Recall",
    "Recalled",
    "Remark",
    "Rollout",
    "ScoreFailure",
    "ScoredRollout",
    "StepReport",
    "TensorEntry",
    "WeightApplied",
    "WeightDraft",
    "WeightFailed",
    "WeightLink",
    "WeightManifest",
    "WeightPart",
    "WeightPiece",
    "WeightStaged",
]
