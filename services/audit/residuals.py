"""Compares recorded log-probabilities with recomputed ones, in sequential tests.

Three hypotheses per engine: its log-probabilities equal the version's except for rounding; its tokens are
drawn from them; its samples are drawn independently. The size of rounding is measured: Hugging Face's model
is computed in the engine's dtype and in a better one, on the same rows.

Shapes: T own tokens of a row.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.audit.alarms import Alarm
from services.audit.evidence import ALTERNATIVES, Evidence, FalseAlarms, rate_ratios
from services.audit.recompute import POWERS, RowScores
from services.audit.records import TrainedGroup, turns_of

OUTLIER_RATE = 0.002
"""Largest share of tokens with a difference above the limit in a run without a fault."""
ROUNDING_MARGIN = 8.0
"""Limit of a difference, as a multiple of the largest rounding error in Hugging Face's model."""
MIN_LIMIT = 1e-6
"""Smallest limit of a difference, nats."""
COPY_SHARES = (0.05, 0.5)
"""Alternatives to independent samples: shares of copies of the group's earlier samples."""
MIN_CONFINED_SHARE = 0.9
"""Minimum share of differing tokens for a value of an axis to be named; all tokens must have less."""
AXES = ("version", "lag", "position", "turn", "sample")
TALLY_STEPS = 64
"""Number of steps for which the places of tokens are kept."""


@dataclass(slots=True)
class NoiseFloor:
    """Largest rounding errors, by dtype."""

    largest: dict[str, float] = field(default_factory=dict)

    def learn(self, dtype: str, engine_scores: RowScores, better_scores: RowScores) -> None:
        """Update from a row computed in the engine's dtype and in a better one."""
        difference = float(np.abs(engine_scores.logprobs - better_scores.logprobs).max(initial=0.0))
        self.largest[dtype] = max(self.largest.get(dtype, 0.0), difference)

    def limit(self, dtype: str) -> float:
        """Return the limit of a difference, nats; infinite before the first update."""
        return max(MIN_LIMIT, ROUNDING_MARGIN * self.largest[dtype]) if dtype in self.largest else math.inf


@dataclass(slots=True)
class Tally:
    """Token counts of one engine in one step, by axis and value."""

    trials: Counter[tuple[str, str]] = field(default_factory=Counter)
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)


def confined_axes(tallies: Iterable[Tally]) -> dict[str, str]:
    """Return the axes on which differing tokens share one value although other tokens do not."""
    trials, hits, found = Counter[tuple[str, str]](), Counter[tuple[str, str]](), dict[str, str]()
    for tally in tallies:
        trials += tally.trials
        hits += tally.hits
    for axis in AXES:
        hits_by_value = {value: count for (name, value), count in hits.items() if name == axis}
        trials_by_value = {value: count for (name, value), count in trials.items() if name == axis}
        top_value = max(hits_by_value, key=lambda value: hits_by_value[value], default="")
        if (
            hits_by_value
            and hits_by_value[top_value] >= MIN_CONFINED_SHARE * sum(hits_by_value.values())
            and trials_by_value[top_value] < MIN_CONFINED_SHARE * sum(trials_by_value.values())
        ):
            found[axis] = top_value
    return found


class Residuals:
    """Evidence of all engines, and the places of differing tokens."""

    def __init__(self, alarms: FalseAlarms, noise: NoiseFloor, dtype: str, *, are_draws: bool) -> None:
        """Test within the allowed false alarms; engines compute in `dtype`.

        If the samples are not draws (`are_draws`), only their log-probabilities are tested: selected samples
        legitimately follow another distribution.
        """
        self._alarms, self.noise, self._dtype = alarms, noise, dtype
        self._names = ("logprob", "sampling", "copy") if are_draws else ("logprob",)
        self._evidence: dict[tuple[str, str], Evidence] = {}
        self._tallies: dict[tuple[str, int], Tally] = defaultdict(Tally)
        """(engine, step) -> token counts."""
        self._example: dict[tuple[str, str], tuple[int, int]] = {}
        self._largest: dict[str, float] = {}
        self._reported = set[tuple[str, str]]()

    def add(self, step: int, group: TrainedGroup, version: int, scores: Mapping[int, RowScores]) -> None:
        """Add a group's rows; `scores` are indexed by row number, under `version`."""
        engine, limit = group.scored.rollout.engine, self.noise.limit(self._dtype)
        ratios = {
            "logprob": np.zeros(len(ALTERNATIVES)),
            "sampling": np.zeros(len(POWERS)),
            "copy": np.zeros(len(COPY_SHARES)),
        }
        earlier: list[tuple[int, ...]] = []
        for number, row_scores in scores.items():
            row = group.view.rows[number]
            is_selected = row.sampled & (row.versions == version)
            if not is_selected.any():
                continue
            differences = np.abs(row.logprobs - row_scores.logprobs)
            is_outlier = is_selected & ~(differences <= limit)
            ratios["logprob"] += rate_ratios(int(is_outlier.sum()), int(is_selected.sum()), OUTLIER_RATE)
            ratios["sampling"] += row_scores.tempered[is_selected].sum(0)
            if (row.versions[row.sampled] == version).all():
                sampled = tuple(row.tokens[row.sampled].tolist())
                copies = _copy_ratio(sampled, earlier, float(row_scores.logprobs[is_selected].sum()))
                ratios["copy"] += copies
                if copies[0] > 0:
                    self._example["copy", engine] = (group.view.group, row.sample)
                earlier.append(sampled)
            self._tally_tokens(group, number, is_selected, is_outlier)
            if is_outlier.any():
                self._example["logprob", engine] = (group.view.group, row.sample)
                self._largest[engine] = max(
                    self._largest.get(engine, 0.0), float(differences[is_outlier].max())
                )
        for name in self._names:
            key, values = (name, engine), ratios[name]
            self._evidence.setdefault(key, Evidence(len(values))).add(step, values)

    def alarms(self, step: int) -> Iterator[Alarm]:
        """Yield the hypotheses that are newly refuted."""
        for key, evidence in self._evidence.items():
            name, engine = key
            if key in self._reported or evidence.log < self._alarms.limit(f"{name} {engine}"):
                continue
            self._reported.add(key)
            group, sample = self._example.get(key, (-1, -1))
            where = {"engine": engine} | (
                self._confined_axes(engine, evidence.since) if name == "logprob" else {}
            )
            detail, chance = self._detail(name, engine), math.exp(-min(evidence.log, 700.0))
            yield Alarm(name, step, evidence.since, where, detail, chance, group, sample)

    def _confined_axes(self, engine: str, since: int) -> dict[str, str]:
        return confined_axes(
            tally for (name, step), tally in self._tallies.items() if name == engine and step >= since
        )

    def _detail(self, name: str, engine: str) -> str:
        if name == "logprob":
            return (
                f"log-probabilities are up to {self._largest[engine]:.2g} nats from the version's, rounding "
                f"gives {self.noise.largest[self._dtype]:.1g}"
            )
        if name == "sampling":
            return "tokens are not drawn from the recorded distribution: temperature, top-p or seed"
        return "samples of a group are copies of each other, beyond chance"

    def _tally_tokens(
        self, group: TrainedGroup, number: int, is_selected: NDArray[np.bool_], is_outlier: NDArray[np.bool_]
    ) -> None:
        row, engine = group.view.rows[number], group.scored.rollout.engine
        tally = self._tallies[engine, group.plan.step]
        before = len(group.view.prompt) + len(row.context)
        # a turn starts at its recorded place, and after inserted tokens
        begins = (
            np.concatenate([[True], row.sampled[1:] & ~row.sampled[:-1]]) if len(row.tokens) else row.sampled
        )
        begins[[first for first, _ in turns_of(group).get(number, [])]] = True
        turns = begins.cumsum()
        for place in is_selected.nonzero()[0].tolist():
            values = (
                str(int(row.versions[place])),
                str(group.plan.step - int(row.versions[place])),
                _position_range(before + place),
                str(turns[place]),
                f"{group.view.group}/{row.sample}",
            )
            keys = list(zip(AXES, values, strict=True))
            tally.trials.update(keys)
            tally.hits.update(keys if is_outlier[place] else ())
        for key in [key for key in self._tallies if key[1] <= group.plan.step - TALLY_STEPS]:
            del self._tallies[key]


def _copy_ratio(
    sampled: tuple[int, ...], earlier: list[tuple[int, ...]], logprob: float
) -> NDArray[np.float64]:
    """Return the log-ratios of a sample: shares of copies of earlier samples against an independent draw."""
    if not earlier:
        return np.zeros(len(COPY_SHARES))
    copied, shares = earlier.count(sampled) / len(earlier), np.array(COPY_SHARES)
    ratios: NDArray[np.float64] = np.log(1 - shares + shares * copied / math.exp(max(logprob, -600.0)))
    return ratios


def _position_range(position: int) -> str:
    """Return the range of positions, from a power of two to the next, that contains a position."""
    low = 1 << max(position, 1).bit_length() - 1
    return f"{low}-{2 * low - 1}"
