"""Reading scored groups: every array is checked against the others before anybody computes with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtocolError
from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array

MOST_GROUPS = 10**12
"""Group ids have twelve digits in the ledger."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One checked sample: arrays [T_i] over its response."""

    group: int
    row: int
    """Of the group within the batch."""
    prompt: NDArray[Any]
    tokens: NDArray[Any]
    logprobs: NDArray[Any]
    sampled: NDArray[Any]
    """bool."""
    versions: NDArray[Any]
    reward: float
    max_staleness: int


def token_counts(rollout: Rollout) -> dict[int, int]:
    """Sampled tokens of a rollout for each version, as `Ledger.accept` wants them.

    Raises:
        ProtocolError: if its arrays do not fit together; names group and field.
    """
    lengths = _lengths(rollout)
    sampled = _sampled(rollout, int(lengths.sum()))
    versions = _versions(rollout, lengths)[sampled]
    return {int(v): int(n) for v, n in zip(*np.unique(versions, return_counts=True), strict=True)}


def samples_of(scored: ScoredRollout, index: int, max_staleness: int, step: int) -> Iterator[Sample]:
    """Check a scored group and cut it into its samples.

    Args:
        scored: the group as received.
        index: its place in the batch.
        max_staleness: the bound of its lease.
        step: version that the step starts from.

    Raises:
        ProtocolError: names group and field.
    """
    rollout = scored.rollout
    lengths = _lengths(rollout)
    total = int(lengths.sum())
    prompt = _array(rollout.group, "prompt_tokens", rollout.prompt_tokens, "int32", (None,))
    tokens = _array(rollout.group, "tokens", rollout.tokens, "int32", (total,))
    logprobs = _array(rollout.group, "logprobs", rollout.logprobs, "float32", (total,))
    rewards = _array(rollout.group, "rewards", scored.rewards, "float32", (len(lengths),))
    sampled, versions = _sampled(rollout, total), _versions(rollout, lengths)
    _require(len(prompt) > 0, rollout.group, "prompt_tokens", "is empty")
    _require(bool((prompt >= 0).all()), rollout.group, "prompt_tokens", "has a negative token")
    _require(bool((tokens >= 0).all()), rollout.group, "tokens", "has a negative token")
    _require(bool(np.isfinite(logprobs).all()), rollout.group, "logprobs", "is not finite")
    _require(bool(np.isfinite(rewards).all()), rollout.group, "rewards", "is not finite")
    _require(
        total == 0 or int(versions.max()) <= step, rollout.group, "spans", f"has a version after step {step}"
    )
    start = 0
    for length, reward in zip(lengths.tolist(), rewards.tolist(), strict=True):
        own = slice(start, start + length)
        yield Sample(
            rollout.group,
            index,
            prompt,
            tokens[own],
            logprobs[own],
            sampled[own],
            versions[own],
            reward,
            max_staleness,
        )
        start += length


def _lengths(rollout: Rollout) -> NDArray[Any]:
    _require(0 <= rollout.group < MOST_GROUPS, rollout.group, "group", f"is not between 0 and {MOST_GROUPS}")
    lengths = _array(rollout.group, "lengths", rollout.lengths, "int32", (None,))
    _require(len(lengths) > 0, rollout.group, "lengths", "is empty")
    _require(bool((lengths >= 0).all()), rollout.group, "lengths", "has a negative length")
    total = int(lengths.sum(dtype=np.int64))
    _array(rollout.group, "tokens", rollout.tokens, "int32", (total,))
    return lengths


def _sampled(rollout: Rollout, total: int) -> NDArray[Any]:
    mask = _array(rollout.group, "loss_mask", rollout.loss_mask, "uint8", (total,))
    _require(bool((mask <= 1).all()), rollout.group, "loss_mask", "has a value other than 0 and 1")
    return mask.astype(bool)


def _versions(rollout: Rollout, lengths: NDArray[Any]) -> NDArray[Any]:
    """int32 [T]: the version of each token. The spans must cover every sample from its first token to its
    last, in order."""
    spans = _array(rollout.group, "spans", rollout.spans, "int32", (None, 3)).tolist()
    versions = np.empty(int(lengths.sum()), dtype=np.int32)
    sample, done, start = 0, 0, 0
    for row, (owner, end, version) in enumerate(spans):
        while sample < len(lengths) and done == lengths[sample]:
            start, sample, done = start + done, sample + 1, 0
        fits = sample < len(lengths) and owner == sample and done < end <= lengths[sample]
        _require(
            fits,
            rollout.group,
            "spans",
            f"row {row} ({owner}, {end}, {version}) does not continue sample {sample} at token {done}",
        )
        _require(version >= 0, rollout.group, "spans", f"row {row} has version {version}")
        versions[start + done : start + end] = version
        done = end
    _require(
        start + done == len(versions),
        rollout.group,
        "spans",
        f"cover {start + done} of {len(versions)} tokens",
    )
    return versions


def _array(group: int, field: str, array: Array, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """The values of `array`, if it has this dtype and shape (None is any length)."""
    _require(array.dtype == dtype, group, field, f"is {array.dtype}, not {dtype}")
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    _require(
        fits, group, field, f"has shape {list(array.shape)}, not {['any' if n is None else n for n in shape]}"
    )
    try:
        return array.numpy()
    except ProtocolError as error:
        raise ProtocolError(f"group {group}: {field}: {error}") from error


def _require(condition: bool, group: int, field: str, what: str) -> None:
    if not condition:
        raise ProtocolError(f"group {group}: {field} {what}")
