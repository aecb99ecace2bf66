"""Evaluates the samples of a run. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SLOPE_LIMIT_MB_PER_MIN = 1.0
Sample = Mapping[str, Any]


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope, per minute; 0 for fewer than two samples."""
    n = len(times_s)
    if n < 2:
        return 0.0
    mean_t, mean_v = sum(times_s) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in times_s)
    return 60 * sum((t - mean_t) * (v - mean_v) for t, v in zip(times_s, values, strict=True)) / spread


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last two thirds of the run, in time: caches and queues have filled up before."""
    start = samples[0]["time"] + (samples[-1]["time"] - samples[0]["time"]) / 3
    return [sample for sample in samples if sample["time"] >= start]


def rss_slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """Return MB/min of each process over the last two thirds."""
    late = settled(samples)
    times = [sample["time"] for sample in late]
    return {name: slope(times, [sample["rss"][name] / 1e6 for sample in late]) for name in late[0]["rss"]}


def cpu_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the cores that each process used over the last two thirds."""
    late = settled(samples)
    seconds = late[-1]["time"] - late[0]["time"]
    return {name: (late[-1]["cpu"][name] - late[0]["cpu"][name]) / seconds for name in late[0]["cpu"]}


def misplaced(audit: Path) -> dict[str, list[int]]:
    """Return groups with no end or more than one, from the log alone.

    These were trained more than once, trained and dropped, or neither and cannot be leased again. A run
    without rewinds is expected: each group has one end.
    """
    ends: Counter[int] = Counter()
    open_groups: set[int] = set()
    held: set[int] = set()
    for event in _events(audit):
        match event["event"]:
            case "lease":
                open_groups.add(event["group"])
                held.add(event["group"])
            case "release" | "lost" | "accept":
                held.discard(event["group"])
            case "drop":
                ends[event["group"]] += 1
                open_groups.discard(event["group"])
            case "commit":
                for group in map(int, event["groups"]):
                    ends[group] += 1
                    open_groups.discard(group)
    doubled = sorted(group for group, count in ends.items() if count > 1)
    return {"doubled": doubled, "open": sorted(open_groups), "held": sorted(open_groups & held)}


def _events(audit: Path) -> Iterable[dict[str, Any]]:
    with audit.open() as lines:
        for line in lines:
            yield json.loads(line)
