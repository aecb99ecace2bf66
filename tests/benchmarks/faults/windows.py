"""Windows of a run in which processes are killed at one rate each, and what they say together.

A round has a window for each period and one without kills, in an order drawn from the seed, so that whatever
else slows the machine meets every rate alike. A ratio divides the tokens of a rate's windows by the
undisturbed tokens of the same rounds.
"""

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL: who got it, and seconds since the epoch."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of a run with a kill every `period_s` seconds, 0 for none; times since the epoch."""

    round: int
    period_s: float
    began: float
    ended: float
    kills: tuple[Kill, ...] = ()


def plan(periods: Sequence[float], rounds: int, seed: int) -> list[tuple[int, float]]:
    """Return round and period of each window, in order."""
    rng = random.Random(seed)
    return [
        (number, period)
        for number in range(rounds)
        for period in rng.sample([0.0, *periods], len(periods) + 1)
    ]


def kill_times(period_s: float, window_s: float) -> list[float]:
    """Return seconds from the beginning of a window: the middle of each period, none for 0."""
    count = int(window_s // period_s) if period_s else 0
    return [period_s * (index + 0.5) for index in range(count)]


def measure(window: Window, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a window's trained tokens a second, and the longest time without a commit after each kill."""
    inside = [step for step in steps if window.began <= step["time"] <= window.ended]
    seconds = window.ended - window.began
    tokens = sum(step["trained_tokens"] for step in inside)
    times = [window.began, *(step["time"] for step in inside), window.ended]
    gaps = list(itertools.pairwise(times))
    ends = [*(kill.at for kill in window.kills[1:]), window.ended]
    return {
        "round": window.round,
        "period_s": window.period_s,
        "seconds": round(seconds, 1),
        "commits": len(inside),
        "trained_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "kills": [
            {
                "name": kill.name,
                "at": round(kill.at - window.began, 1),
                "gap_s": round(max((b - a for a, b in gaps if b > kill.at and a < end), default=0.0), 2),
            }
            for kill, end in zip(window.kills, ends, strict=False)
        ],
    }


def curve(windows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each period: kills, tokens a second, and the ratio to windows without kills.

    `least` and `most` are the ratios of single rounds. `by_gaps` is one less the time lost to kills, the time
    without a commit after each beyond the window's mean, as a share of the windows: load of other programs,
    which differs from window to window, hardly counts in it.
    """
    rates: dict[float, dict[int, float]] = {}
    kills: dict[float, int] = {}
    for window in windows:
        period = window["period_s"]
        rates.setdefault(period, {})[window["round"]] = window["tokens_per_s"]
        kills[period] = kills.get(period, 0) + len(window["kills"])
    undisturbed = rates[0.0]
    rows = []
    for period, by_round in sorted(rates.items(), key=lambda item: (item[0] > 0, -item[0])):
        ratios = [rate / undisturbed[number] for number, rate in by_round.items()]
        rows.append(
            {
                "period_s": period,
                "kills": kills[period],
                "tokens_per_s": round(statistics.fmean(by_round.values()), 1),
                "ratio": round(sum(by_round.values()) / sum(undisturbed[n] for n in by_round), 3),
                "least": round(min(ratios), 3),
                "most": round(max(ratios), 3),
                "by_gaps": round(1 - _lost_share([w for w in windows if w["period_s"] == period]), 3),
            }
        )
    return rows


def _lost_share(windows: Sequence[Mapping[str, Any]]) -> float:
    lost_s = sum(
        max(0.0, kill["gap_s"] - window["seconds"] / max(1, window["commits"]))
        for window in windows
        for kill in window["kills"]
    )
    return lost_s / sum(window["seconds"] for window in windows)


def gaps_by_service(windows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each service how often it was killed, and the median and longest time without a commit."""
    gaps: dict[str, list[float]] = {}
    for window in windows:
        for kill in window["kills"]:
            gaps.setdefault(kill["name"], []).append(kill["gap_s"])
    return {
        name: {"kills": len(all_s), "median_s": round(statistics.median(all_s), 2), "longest_s": max(all_s)}
        for name, all_s in sorted(gaps.items())
    }
