"""From scored groups to a batch: every array is checked, tokens over the bound are masked or refused, and the result is checked again."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import BoundViolation, ProtocolError
from protocol.messages import Rollout, ScoredRollout
from protocol.staleness import lag
from protocol.tensors import Array
from trainer.algorithms.base import Algorithm
from trainer.batch import Batch

TrainedCounts = dict[int, dict[int, int]]
"""group -> version -> tokens that carry gradient."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a batch looks like, before it is trained. Names as in `StepReport`."""

    lag_histogram: dict[int, int]
    """Trained tokens for each lag."""
    lag_mean: float
    """Of trained tokens, in versions."""
    lag_max: int
    trained_tokens: int
    masked_tokens: int
    """Sampled tokens that carry no gradient because they are over the bound."""
    response_length_mean: float
    """Tokens of a sample after the prompt, inserted ones included."""
    reward_mean: float
    reward_std: float
    """Over all samples; divides by their number."""
    generate_s: float
    """Mean over groups."""


class BuiltBatch(NamedTuple):
    """What `build_batch` returns."""

    batch: Batch
    """On the CPU."""
    trained_counts: TrainedCounts
    """As `Ledger.commit` wants them; every group has an entry, perhaps an empty one."""
    stats: BatchStats


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


def build_batch(
    groups: Sequence[tuple[ScoredRollout, int]], *, step: int, algorithm: Algorithm, temperature: float, mask_late: bool
) -> BuiltBatch:
    """Make the batch of a step.

    Args:
        groups: scored groups, each with the bound that was in force when it was leased.
        step: version that the step starts from.
        algorithm: gives the advantages.
        temperature: at which the engines sampled.
        mask_late: whether sampled tokens over the bound lose their gradient; otherwise they are an error.

    Raises:
        ProtocolError: arrays that do not fit together, are not finite or come from the future; names group and field.
        BoundViolation: a token over the bound with `mask_late` off, or one that the masking missed.
    """
    samples: list[Sample] = []
    numbers: set[int] = set()
    for index, (scored, max_staleness) in enumerate(groups):
        if scored.rollout.group in numbers:
            raise ProtocolError(f"group {scored.rollout.group}: comes twice in the batch of step {step}")
        numbers.add(scored.rollout.group)
        samples.extend(samples_of(scored, index, max_staleness, step))
    if not samples:
        raise ProtocolError(f"step {step}: the batch has no samples")
    batch = _pad(samples, step=step, temperature=temperature)
    if not mask_late:
        check_bound(batch, samples, batch.sampled_mask)
    _mask_and_score(batch, samples, algorithm)
    check_bound(batch, samples, batch.loss_mask)
    counts = _trained_counts(batch, [scored.rollout.group for scored, _ in groups])
    return BuiltBatch(batch, counts, _stats(batch, samples, [scored.rollout.generate_s for scored, _ in groups]))


def check_bound(batch: Batch, samples: Sequence[Sample], mask: torch.Tensor) -> None:
    """Go through every token under `mask`, one by one, and compare its lag with the bound of its group's lease.

    Deliberately written against the samples as received and not with the arithmetic that made the mask.

    Raises:
        BoundViolation: names the first offender.
    """
    for row, sample in enumerate(samples):
        for column in mask[row].nonzero()[:, 0].tolist():
            position = column - len(sample.prompt)
            if not 0 <= position < len(sample.tokens) or not sample.sampled[position]:
                raise BoundViolation(f"group {sample.group}: token {column} of row {row} would be trained but was not sampled")
            version = int(sample.versions[position])
            if batch.step - version > sample.max_staleness:
                raise BoundViolation(
                    f"group {sample.group}: token {position} of version {version} has lag {batch.step - version} in step {batch.step}, "
                    f"over the bound of {sample.max_staleness}"
                )


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
    _require(total == 0 or int(versions.max()) <= step, rollout.group, "spans", f"has a version after step {step}")
    start = 0
    for length, reward in zip(lengths.tolist(), rewards.tolist(), strict=True):
        own = slice(start, start + length)
        yield Sample(rollout.group, index, prompt, tokens[own], logprobs[own], sampled[own], versions[own], reward, max_staleness)
        start += length


def _lengths(rollout: Rollout) -> NDArray[Any]:
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
    """int32 [T]: the version of each token. The spans must cover every sample from its first token to its last, in order."""
    spans = _array(rollout.group, "spans", rollout.spans, "int32", (None, 3)).tolist()
    versions = np.empty(int(lengths.sum()), dtype=np.int32)
    sample, done, start = 0, 0, 0
    for row, (owner, end, version) in enumerate(spans):
        while sample < len(lengths) and done == lengths[sample]:
            start, sample, done = start + done, sample + 1, 0
        fits = sample < len(lengths) and owner == sample and done < end <= lengths[sample]
        _require(fits, rollout.group, "spans", f"row {row} ({owner}, {end}, {version}) does not continue sample {sample} at token {done}")
        _require(version >= 0, rollout.group, "spans", f"row {row} has version {version}")
        versions[start + done : start + end] = version
        done = end
    _require(start + done == len(versions), rollout.group, "spans", f"cover {start + done} of {len(versions)} tokens")
    return versions


def _array(group: int, field: str, array: Array, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """The values of `array`, if it has this dtype and shape (None is any length)."""
    _require(array.dtype == dtype, group, field, f"is {array.dtype}, not {dtype}")
    fits = len(array.shape) == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    _require(fits, group, field, f"has shape {list(array.shape)}, not {['any' if n is None else n for n in shape]}")
    try:
        return array.numpy()
    except ProtocolError as error:
        raise ProtocolError(f"group {group}: {field}: {error}") from error


def _require(condition: bool, group: int, field: str, what: str) -> None:
    if not condition:
        raise ProtocolError(f"group {group}: {field} {what}")


def _pad(samples: Sequence[Sample], *, step: int, temperature: float) -> Batch:
    """Tensors of all samples, with an empty loss mask and no advantages yet."""
    rows = len(samples)
    sequence_lengths = torch.tensor([len(s.prompt) + len(s.tokens) for s in samples], dtype=torch.int64)
    shape = (rows, int(sequence_lengths.max()))
    batch = Batch(
        step=step,
        tokens=torch.zeros(shape, dtype=torch.int64),
        sequence_lengths=sequence_lengths,
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        sampled_mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape),
        versions=torch.full(shape, -1, dtype=torch.int32),
        advantages=torch.zeros(shape),
        group_index=torch.tensor([s.row for s in samples], dtype=torch.int64),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        temperature=temperature,
    )
    for row, sample in enumerate(samples):
        first, end = len(sample.prompt), len(sample.prompt) + len(sample.tokens)
        sampled = torch.from_numpy(sample.sampled.copy())
        batch.tokens[row, :first] = torch.from_numpy(sample.prompt.astype(np.int64))
        batch.tokens[row, first:end] = torch.from_numpy(sample.tokens.astype(np.int64))
        batch.sampled_mask[row, first:end] = sampled
        batch.behaviour_logprobs[row, first:end] = torch.where(sampled, torch.from_numpy(sample.logprobs.copy()), 0.0)
        batch.versions[row, first:end] = torch.where(sampled, torch.from_numpy(sample.versions.copy()), -1)
    return batch


def _mask_and_score(batch: Batch, samples: Sequence[Sample], algorithm: Algorithm) -> None:
    """Fill in the loss mask and the advantages."""
    bounds = torch.tensor([s.max_staleness for s in samples])[:, None]
    batch.loss_mask.copy_(batch.sampled_mask & (batch.step - batch.versions <= bounds))
    advantages = algorithm.advantages(batch.rewards, batch.group_index)
    batch.advantages.copy_(torch.where(batch.loss_mask, advantages[:, None], 0.0))


def _trained_counts(batch: Batch, groups: Sequence[int]) -> TrainedCounts:
    counts: TrainedCounts = {group: {} for group in groups}
    for index, group in enumerate(groups):
        rows = batch.group_index == index
        values, numbers = batch.versions[rows][batch.loss_mask[rows]].unique(return_counts=True)
        counts[group] = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    return counts


def _stats(batch: Batch, samples: Sequence[Sample], generate_s: Sequence[float]) -> BatchStats:
    histogram = Counter(lag(batch.step, version) for version in batch.versions[batch.loss_mask].tolist())
    trained, rewards = histogram.total(), batch.rewards.double()
    return BatchStats(
        lag_histogram=dict(sorted(histogram.items())),
        lag_mean=sum(n * count for n, count in histogram.items()) / max(trained, 1),
        lag_max=max(histogram, default=0),
        trained_tokens=trained,
        masked_tokens=int(batch.sampled_mask.sum()) - trained,
        response_length_mean=sum(len(s.tokens) for s in samples) / len(samples),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        generate_s=sum(generate_s) / len(generate_s),
    )
