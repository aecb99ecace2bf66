"""Turns the steps of a loop into trained tokens a second, and compares loops."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = 4
"""Steps left out at the beginning: what is compiled, and the loop fills up."""
LAST = 2
"""Steps left out at the end, in which nothing is generated any more beside them."""
MEANS = (
    "wait_s",
    "train_s",
    "publish_s",
    "other_s",
    "engine_busy",
    "lag_mean",
    "wasted_tokens",
    "response_length_mean",
    "mfu",
    "memory_peak_gb",
)
"""Fields of a step report of ours that explain the figure."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a loop."""

    time: float
    """At its end, seconds."""
    trained_tokens: float
    """Tokens that carried gradient."""


def steps_of(reports: Sequence[Mapping[str, Any]]) -> list[Step]:
    """Return the steps of a run: of ours from its metrics.jsonl, of TRL's from what it printed."""
    return [Step(report["time"], report["trained_tokens"]) for report in reports]


def printed_steps(output: str, begin: str) -> list[dict[str, Any]]:
    """Return the steps that are in a program's output, each on a line that begins so."""
    lines = (line.removeprefix(begin) for line in output.splitlines() if line.startswith(begin))
    return [json.loads(line) for line in lines]


def speed(steps: Sequence[Step], *, first: int = FIRST, last: int = LAST) -> dict[str, Any]:
    """Return trained tokens a second over the steps in the middle of a run.

    Args:
        steps: of the whole run.
        first: steps left out at the beginning, at least 1: what comes before it is not known.
        last: steps left out at the end.

    Raises:
        ValueError: no step is left.
    """
    counted = steps[first : len(steps) - last]
    if first < 1 or not counted:
        raise ValueError(f"{len(steps)} steps: none is left without the first {first} and the last {last}")
    seconds = counted[-1].time - steps[first - 1].time
    tokens = sum(step.trained_tokens for step in counted)
    return {
        "trained_tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "trained_tokens_of_step": tokens / len(counted),
        "counted_steps": len(counted),
        "seconds_of_steps": [after.time - before.time for before, after in itertools.pairwise(steps)],
    }


def means_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over the counted steps of what explains a run of ours; null fields are left out."""
    found: dict[str, float] = {}
    for name in MEANS:
        numbers = [report[name] for report in reports[FIRST : len(reports) - LAST]]
        measured = [number for number in numbers if number is not None]
        if measured:
            found[name] = statistics.fmean(measured)
    return found


def ratios_of(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return each way of ours by each way of TRL's, and by ours with vLLM, in trained tokens a second."""
    speeds = {name: found["trained_tokens_per_s"] for name, found in ways.items()}
    return {
        f"{ours}_over_{theirs}": speeds[ours] / speeds[theirs]
        for ours in speeds
        for theirs in speeds
        if ours.startswith("tether") and ours != theirs and (theirs == "tether" or theirs.startswith("trl"))
    }
