"""Writes how a run that is over ended, for `tether status` and for commands that it refuses."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.observability.status import drops, warnings_of

STEP_FIELDS = ("reward_mean", "lag_mean", "lag_max", "trained_tokens", "loss")


def render_ended_run(facts: Mapping[str, Any]) -> str:
    """Return the result of `describe_ended_run` as text."""
    lines = [
        f"run {facts['run']} {_verb(facts['run_state'])} at version {facts['version']} of {facts['steps']}"
        + (f", {_clock(facts['ended'])}" if facts["ended"] else ""),
        f"why: {facts['why']}",
    ]
    if facts["last_step"]:
        lines.append(describe_step(facts["last_step"]))
    counts = [f"{name} {facts[name]}" for name in ("issued", "trained", "dropped") if facts[name] is not None]
    reasons = drops(facts)
    if counts:
        lines.append(f"groups: {', '.join(counts)}" + (f" ({reasons})" if reasons else ""))
    lines += [facts["bottleneck"]] if facts["bottleneck"] else []
    lines += warnings_of(facts)
    directory = Path(facts["run_dir"])
    lines.append(f"results in {directory}: {', '.join(facts['results']) or 'none'}")
    return "\n".join(lines)


def refusal(facts: Mapping[str, Any], command: str) -> str:
    """Return one sentence: a command for a running run was given to one that is over."""
    when = f" on {_clock(facts['ended'])}" if facts["ended"] else ""
    more = " with more --steps" if facts["run_state"] == "done" else ""
    return (
        f"run {facts['run']} is not on: it {_verb(facts['run_state'])} at version {facts['version']} of "
        f"{facts['steps']}{when}; `tether {command}` changes a run that is on, so start it first: "
        f"`tether up`{more}"
    )


def describe_step(line: Mapping[str, Any]) -> str:
    """Return the main numbers of a step on one line."""
    numbers = [
        f"{name.removesuffix('_mean').replace('_', ' ')} {_short(line[name])}"
        for name in STEP_FIELDS
        if isinstance(line.get(name), (int, float))
    ]
    skipped = f"; skipped: {line['skipped']}" if line.get("skipped") else ""
    return f"last step {line['step']}: {', '.join(numbers)}{skipped}"


def _verb(state: str) -> str:
    if state in ("drained", "stopped"):
        return f"was {state}"
    return state if state == "failed" else f"is {state}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
