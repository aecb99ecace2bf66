"""Builds the batch of a step from scored groups.

Every array is checked, tokens over the staleness bound are masked or refused, and the result is checked
again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from protocol.errors import BoundViolation, ProtocolError
from protocol.messages import ScoredRollout
from protocol.staleness import lag
from trainer.algorithms.base import Algorithm
from trainer.batch import Batch
from trainer.data.samples import BatchSample, samples_of

TrainedCounts = dict[int, dict[int, int]]
"""Group -> version -> tokens that carry gradient."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of a batch before it is trained, with the names of `StepReport`; None: not measured."""

    lag_histogram: dict[int, int]
    """Lag in versions -> trained tokens."""
    lag_mean: float | None
    """Mean lag of trained tokens, in versions."""
    lag_max: int | None
    lag_in_flight_mean: float | None
    """Part of `lag_mean` that passed until the token's group was complete."""
    lag_in_queue_mean: float | None
    """The rest of `lag_mean`."""
    trained_tokens: int
    masked_tokens: int
    """Sampled tokens that carry no gradient because they exceed the bound."""
    response_length_mean: float
    """Mean tokens of a sample after the prompt, inserted ones included."""
    reward_mean: float
    reward_std: float
    """Population standard deviation over all samples."""
    generate_s: float | None
    """Mean seconds to generate a group, over the groups that say."""


class BuiltBatch(NamedTuple):
    """Result of `build_batch`."""

    batch: Batch
    """On the CPU."""
    trained_counts: TrainedCounts
    """As `Ledger.commit` expects them; every group has an entry, possibly an empty one."""
    stats: BatchStats


def build_batch(
    groups: Sequence[tuple[ScoredRollout, int]],
    *,
    step: int,
    algorithm: Algorithm,
    temperature: float,
    mask_late: bool,
) -> BuiltBatch:
    """Build the batch of a step.

    Args:
        groups: scored groups, each with the bound that was in force when it was leased.
        step: version that the step starts from.
        algorithm: computes the advantages.
        temperature: temperature at which the engines sampled.
        mask_late: whether sampled tokens over the bound are masked; otherwise they are an error.

    Raises:
        ProtocolError: arrays contradict each other, hold numbers that are not finite, or tokens of a later
            version; names group and field.
        BoundViolation: a token exceeds the bound and `mask_late` is off, or the masking missed it.
    """
    samples: list[BatchSample] = []
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
    return BuiltBatch(
        batch, counts, _stats(batch, samples, [scored.rollout.generate_s for scored, _ in groups])
    )


def check_bound(batch: Batch, samples: Sequence[BatchSample], mask: torch.Tensor) -> None:
    """Compare the lag of every token under `mask` with the bound of its group's lease, token by token.

    It deliberately reads the samples as received, and does not use the arithmetic that made the mask.

    Args:
        batch: [rows, columns] built of `samples`.
        samples: one per row.
        mask: bool [rows, columns], the tokens to check.

    Raises:
        BoundViolation: a token exceeds the bound or was not sampled; names the first one.
    """
    for row, sample in enumerate(samples):
        for column in mask[row].nonzero()[:, 0].tolist():
            position = column - len(sample.prompt)
            if not 0 <= position < len(sample.tokens) or not sample.sampled[position]:
                raise BoundViolation(
                    f"group {sample.group}: token {column} of row {row} would be trained but was not sampled"
                )
            version = int(sample.versions[position])
            if batch.step - version > sample.max_staleness:
                raise BoundViolation(
                    f"group {sample.group}: token {position} of version {version} has lag "
                    f"{batch.step - version} in step {batch.step}, over the bound of {sample.max_staleness}"
                )


def _pad(samples: Sequence[BatchSample], *, step: int, temperature: float) -> Batch:
    """Return the padded tensors of all samples, without loss mask and advantages."""
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
        batch.behaviour_logprobs[row, first:end] = torch.where(
            sampled, torch.from_numpy(sample.logprobs.copy()), 0.0
        )
        batch.versions[row, first:end] = torch.where(sampled, torch.from_numpy(sample.versions.copy()), -1)
    return batch


def _mask_and_score(batch: Batch, samples: Sequence[BatchSample], algorithm: Algorithm) -> None:
    """Fill in loss mask and advantages."""
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


def _stats(batch: Batch, samples: Sequence[BatchSample], generate_s: Sequence[float]) -> BatchStats:
    histogram = Counter(lag(batch.step, version) for version in batch.versions[batch.loss_mask].tolist())
    trained, rewards = histogram.total(), batch.rewards.double()
    total = sum(n * count for n, count in histogram.items())
    queued = _lag_in_queue(batch)
    known = [seconds for seconds in generate_s if seconds > 0]
    return BatchStats(
        lag_histogram=dict(sorted(histogram.items())),
        lag_mean=total / trained if trained else None,
        lag_max=max(histogram, default=None),
        lag_in_flight_mean=(total - queued) / trained if trained else None,
        lag_in_queue_mean=queued / trained if trained else None,
        trained_tokens=trained,
        masked_tokens=int(batch.sampled_mask.sum()) - trained,
        response_length_mean=sum(len(s.tokens) for s in samples) / len(samples),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        generate_s=sum(known) / len(known) if known else None,
    )


def _lag_in_queue(batch: Batch) -> int:
    """Return the versions from a group's last sampled token to the step, summed over trained tokens.

    The newest version in a group is the one that its engine served when the group was complete.
    """
    newest = torch.full((int(batch.group_index.max()) + 1,), -1, dtype=batch.versions.dtype)
    newest.scatter_reduce_(0, batch.group_index, batch.versions.amax(dim=1), "amax")
    trained = batch.loss_mask.sum(dim=1)
    return int(((batch.step - newest[batch.group_index]) * trained).sum())
