"""Reads scored groups: checks every array before anything is computed from it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Rollout, ScoredRollout
from protocol.rollout_view import checked_array, decode_rollout, require


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One checked sample of a batch. Shapes: P prompt tokens, T_i tokens of the response."""

    group: int
    """Number of the group in the run."""
    row: int
    """Index of the group within the batch."""
    prompt: NDArray[np.int32]
    """[P]."""
    tokens: NDArray[np.int32]
    """[T_i]."""
    logprobs: NDArray[np.float32]
    """[T_i] nats, behaviour log-probabilities."""
    sampled: NDArray[np.bool_]
    """[T_i]: True where the model sampled the token."""
    versions: NDArray[np.int32]
    """[T_i]: weight version of each token."""
    reward: float
    max_staleness: int
    """The bound, in versions, that was in force when the group was leased."""


def token_counts(rollout: Rollout) -> dict[int, int]:
    """Return version -> sampled tokens of a rollout, as `Ledger.accept` expects them.

    Raises:
        ProtocolError: its arrays contradict each other; names group and field.
    """
    return decode_rollout(rollout).token_counts()


def samples_of(scored: ScoredRollout, index: int, max_staleness: int, step: int) -> Iterator[BatchSample]:
    """Check a scored group and yield its samples.

    Args:
        scored: the group as received.
        index: index of the group within the batch.
        max_staleness: the bound of its lease.
        step: version that the step starts from.

    Raises:
        ProtocolError: its arrays contradict each other, a reward is not finite, or a token is of a
            version after
            `step`; names group and field.
    """
    view = decode_rollout(scored.rollout)
    group = view.group
    rewards = checked_array(group, "rewards", scored.rewards, "float32", (len(view.samples),))
    require(bool(np.isfinite(rewards).all()), group, "rewards", "is not finite")
    newest = max(
        (int(sample.versions.max()) for sample in view.samples if len(sample.versions)), default=step
    )
    require(newest <= step, group, "spans", f"has a version after step {step}")
    for sample, reward in zip(view.samples, rewards.tolist(), strict=True):
        yield BatchSample(
            group=group,
            row=index,
            prompt=view.prompt,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            sampled=sample.sampled,
            versions=sample.versions,
            reward=reward,
            max_staleness=max_staleness,
        )


def check_scored(message: ScoredRollout, version: int) -> dict[int, int]:
    """Check that a scored rollout can be trained on, and return its sampled tokens per version.

    Args:
        message: as received.
        version: the committed version; no token can be of a later one.

    Raises:
        ProtocolError: if an array contradicts another, or a number is not finite; names group and field.
    """
    for _ in samples_of(message, 0, 0, version):
        pass
    return token_counts(message.rollout)
