"""Counts the tokens of a step and averages its scores, one sample at a time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout, StepReport
from protocol.rollout_view import cancelled_lengths
from protocol.staleness import lag
from protocol.tensors import Array
from trainer.batch import StepTotals
from trainer.data.samples import EQUAL_REWARDS, NO_VERSION, BatchSample

SOURCE = "source"
"""Metadata field with the name of a prompt's source. Every prompt of a mixture has the field."""
MAX_NAMES = 32
"""Largest number of names, per kind, with an average. Groups with further names are not averaged."""
TrainedCounts = dict[int, dict[int, int]]
"""Group -> version -> number of trained tokens."""


def rewards_of(samples: Sequence[BatchSample]) -> torch.Tensor:
    """Return the rewards as scored, float32 [N]."""
    return torch.tensor([sample.reward for sample in samples], dtype=torch.float32)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share_without_signal(samples: Sequence[BatchSample]) -> float | None:
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group, []).append(sample.reward)
    equal = [max(group) - min(group) <= EQUAL_REWARDS for group in rewards.values() if len(group) > 1]
    return sum(equal) / len(equal) if equal else None


class StepTally:
    """Running counts over the groups and samples added so far."""

    def __init__(self, step: int, max_tokens: int = 0) -> None:
        """Start empty. `max_tokens` is the token limit of one generation, 0 if unknown."""
        self._cuts_all = max_tokens == 1
        self.sample_of_row: list[int] = []
        """[R]: index of the sample of each row."""
        self.sampled_tokens: list[int] = []
        """[N]: sampled tokens of each sample, over all of its rows."""
        self.trained_tokens: list[int] = []
        """[N]: tokens under the loss mask."""
        self.fresh: list[bool] = []
        """[N]: whether there are trained tokens of lag 0."""
        self.response_tokens: list[int] = []
        """[N]: response tokens of each sample, including inserted tokens."""
        self.step = step
        self._counts: TrainedCounts = {}
        self._newest: dict[int, int] = {}
        """Group -> newest version of a sampled token."""
        self._generate_s: list[float] = []
        self._score_s: list[float] = []
        self._rewards_by_source: dict[str, list[float]] = {}
        """Source -> sum and number of the rewards of its samples."""
        self._scores_by_verifier: dict[str, list[float]] = {}
        """Verifier -> sum and number of its scores, before weighting."""
        self._tokens = self._truncated_tokens = self._read_tokens = self._cached_tokens = 0
        self._cancelled: list[int] = []
        """Number of tokens of each cancelled sample."""
        self._last: tuple[int, int] | None = None
        """Group and sample of the last row."""

    def open_group(self, scored: ScoredRollout) -> None:
        """Begin a group and count its group-level fields.

        Raises:
            ProtocolError: the group was already added.
        """
        rollout, group = scored.rollout, scored.rollout.group
        if group in self._counts:
            raise ProtocolError(f"group {group}: appears twice in the batch of step {self.step}")
        self._counts[group], self._newest[group] = {}, int(NO_VERSION)
        if rollout.generate_s > 0:
            self._generate_s.append(rollout.generate_s)
        if scored.score_s > 0:
            self._score_s.append(scored.score_s)
        if source := _source(rollout.metadata):
            _count(self._rewards_by_source, source, scored.rewards)
        for verifier, scores in scored.components.items():
            _count(self._scores_by_verifier, verifier, scores)
        self._read_tokens += rollout.read_tokens
        self._cached_tokens += rollout.cached_tokens
        self._cancelled += cancelled_lengths(rollout)

    def add(self, sample: BatchSample, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Count a row of an open group. `arrays` are the row's `token_arrays`.

        The rows of a sample must be consecutive.
        """
        if (sample.group, sample.sample) != self._last:
            self._last = sample.group, sample.sample
            for counted in (self.trained_tokens, self.sampled_tokens, self.response_tokens):
                counted.append(0)
            self.fresh.append(False)
        self.sample_of_row.append(len(self.fresh) - 1)
        counts, versions = self._counts[sample.group], arrays["versions"]
        found, numbers = np.unique(versions[arrays["loss_mask"]], return_counts=True)
        for version, number in zip(found.tolist(), numbers.tolist(), strict=True):
            counts[version] = counts.get(version, 0) + number
        self.trained_tokens[-1] += int(numbers.sum())
        self.fresh[-1] |= self.step in found
        self._newest[sample.group] = max(self._newest[sample.group], int(versions.max()))
        sampled = int(np.count_nonzero(sample.sampled))
        self.sampled_tokens[-1] += sampled
        self._truncated_tokens += sampled * sample.masked
        self._tokens += len(sample)
        self.response_tokens[-1] += len(sample.tokens) - sample.own_prompt

    def first_rows(self, rows: Sequence[BatchSample]) -> list[BatchSample]:
        """Return the first row of each sample. `rows` are all rows, in the order of `add`."""
        return [
            row for i, row in enumerate(rows) if self.sample_of_row[i] != self.sample_of_row[i - 1] or i == 0
        ]

    def trained_counts(self) -> TrainedCounts:
        """Return the argument of `Ledger.commit`: an entry for every group, possibly empty."""
        return {group: dict(sorted(counts.items())) for group, counts in self._counts.items()}

    def totals(self) -> StepTotals:
        """Return the totals of the step that a replica needs."""
        lags = self._lag_histogram()
        return StepTotals(
            samples=len(self.sampled_tokens),
            trained_tokens=lags.total(),
            lag_max=max(lags, default=0),
            fresh=0 in lags,
        )

    def stats(self, samples: Sequence[BatchSample], truncated: str, shaped: torch.Tensor) -> StepReport:
        """Return the report of the step, with the statistics known before training.

        Args:
            samples: first row of each sample.
            truncated: `algorithm.truncated`.
            shaped: float32 [N]: rewards from which advantages are computed.
        """
        histogram, values = self._lag_histogram(), rewards_of(samples).double()
        trained = histogram.total()
        masked = sum(self.sampled_tokens) - trained - self._truncated_tokens
        total, queued = sum(n * count for n, count in histogram.items()), self._lag_in_queue()
        cut = sum(sample.truncated for sample in samples) / len(samples)
        return StepReport(
            step=self.step,
            version=self.step + 1,
            epoch="",
            lag_histogram=dict(sorted(histogram.items())),
            lag_mean=total / trained if trained else None,
            lag_max=max(histogram, default=None),
            lag_in_flight_mean=(total - queued) / trained if trained else None,
            lag_in_queue_mean=queued / trained if trained else None,
            step_tokens=self._tokens,
            trained_tokens=trained,
            masked_tokens=masked,
            masked_share=masked / (masked + trained) if masked + trained else None,
            response_length_mean=sum(self.response_tokens) / len(self.sampled_tokens),
            reward_mean=float(values.mean()),
            reward_std=float(values.std(correction=0)),
            frac_reward_zero_std=_share_without_signal(samples),
            truncated_share=None if self._cuts_all else cut,
            truncated_tokens=self._truncated_tokens if truncated == "mask" else None,
            shaped_reward_mean=float(shaped.double().mean()) if truncated == "shape" else None,
            generate_s=_mean(self._generate_s),
            prefix_hit_rate=self._cached_tokens / self._read_tokens if self._read_tokens > 0 else None,
            reward_by_source=_means(self._rewards_by_source),
            score_by_verifier=_means(self._scores_by_verifier),
            score_s=_mean(self._score_s),
            cancelled_samples=len(self._cancelled) or None,
            cancelled_tokens=sum(self._cancelled) if self._cancelled else None,
            cancelled_length_mean=_mean(self._cancelled),
        )

    def _lag_histogram(self) -> Counter[int]:
        histogram: Counter[int] = Counter()
        for counts in self._counts.values():
            histogram.update({lag(self.step, version): number for version, number in counts.items()})
        return histogram

    def _lag_in_queue(self) -> int:
        """Return the lag between a group's completion and the step, summed over trained tokens.

        The newest version in a group is the version that its engine served at completion.
        """
        return sum(
            (self.step - self._newest[group]) * sum(counts.values()) for group, counts in self._counts.items()
        )


def _count(sums: dict[str, list[float]], name: str, array: Array) -> None:
    """Add a group's values to the sum and count of `name`; names beyond `MAX_NAMES` are ignored."""
    if name in sums or len(sums) < MAX_NAMES:
        values, found = array.numpy(), sums.setdefault(name, [0.0, 0.0])
        found[0] += float(values.sum(dtype=np.float64))
        found[1] += len(values)


def _means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}


def _source(metadata: bytes) -> str:
    """Return the name of a prompt's source; empty if missing or not a string."""
    try:
        found = msgspec.msgpack.decode(metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    name = found.get(SOURCE) if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""
