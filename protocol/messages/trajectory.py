"""Trajectories: what a rollout worker generated for one prompt group, and the same with its rewards.

Shapes: n samples a group, T tokens of all samples together, S version spans of all samples together.
"""

import msgspec

from protocol.messages.base import Message
from protocol.tensors import Array


class Rollout(Message, tag="rollout", frozen=True, kw_only=True):
    """One generated group, sent by a rollout worker to a reward worker."""

    group: int
    """Number of the group in the run, which is also its position in the prompt stream."""
    token: str
    """The lease token under which it was generated."""
    engine: str
    """Incarnation of the engine that generated it."""
    prompt_tokens: Array
    """int32 [P]: the prompt that all samples share."""
    lengths: Array
    """int32 [n]: tokens of each sample; sums to T."""
    tokens: Array
    """int32 [T]: the samples' tokens after the prompt, one sample after the other."""
    logprobs: Array
    """float32 [T]: behaviour log-probability of each token as sampled (nats); 0 where `loss_mask` is 0."""
    loss_mask: Array
    """uint8 [T]: 1 for tokens that the model sampled, 0 for tokens that the environment inserted."""
    spans: Array
    """int32 [S, 3]: rows (sample, end, version): tokens of the sample before `end` and after the row above
    are of `version`."""
    finish_reasons: tuple[str, ...]
    """[n]: "stop", "length" or "environment"."""
    responses: tuple[str, ...]
    """[n]: the samples as text, for verifiers; decoded by the rollout worker, which owns the tokenizer."""
    prompt_text: str = ""
    metadata: msgspec.Raw = msgspec.Raw(b"\x80")
    """MessagePack map: what the prompt source knows (answer, task name, tests ...), for verifiers."""
    generate_s: float = 0.0
    """Seconds from lease to the last token."""
    environment_rewards: Array | None = None
    """float32 [n]: rewards that the environment itself gave, if it does."""


class ScoredRollout(Message, tag="scored", frozen=True, kw_only=True):
    """A rollout with its rewards, sent by a reward worker to the ingest."""

    rollout: Rollout
    rewards: Array
    """float32 [n]: the combined reward of each sample."""
    components: dict[str, Array] = {}
    """float32 [n] for each verifier, before weighting."""
    scorer: str = ""
    """Incarnation of the reward worker."""
    score_s: float = 0.0
    """Seconds spent scoring."""


class ScoreFailure(Message, tag="score_failure", frozen=True, kw_only=True):
    """A group that could not be scored, sent by a reward worker to the ingest. Never read as reward 0."""

    group: int
    token: str
    verifier: str
    """The verifier that failed."""
    error: str
    """What it said, at most 500 characters."""
    scorer: str = ""
