"""Describes a run that is over from its directory: how and when it ended, its last step and results."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.ledger.event_log.archiver import FILE
from services.observability.skipped_steps import count_skipped, warnings_of
from services.observability.status import drops
from services.observability.steps import read_last, read_steps
from services.run_files.event_tail import EventTail
from services.run_files.halts import explain_halt
from services.run_files.recorded_state import recorded_state
from services.run_files.run_end import read_end
from services.settings.sections import Settings

Facts = dict[str, Any]
STEP_FIELDS = ("reward_mean", "lag_mean", "lag_max", "trained_tokens", "loss")
RESULTS = (FILE, "metrics.jsonl", "eval.jsonl", "progress.png", "checkpoints", "exports", "logs")
"""Files and folders of a run directory that a user may look for."""


def describe_ended_run(settings: Settings) -> Facts:
    """Return what the files of a run say, with the fields of `collect_status` and some more.

    Returns:
        Besides: `why` (what ended the run, one line), `ended` (Unix seconds, or None), `last_step` (its
        line in metrics.jsonl, or None), `results` (names in the run directory).
    """
    tail = EventTail(settings.run_dir)
    while tail.read_more():
        pass
    logged, last = tail.state(), read_last(settings.run_dir / "metrics.jsonl")
    facts = recorded_state(settings, last, tail)
    end = read_end(settings.run_dir)
    state, why = _how(facts, logged, end.error if end else "")
    newest_ms = max(int(logged.get("time_ms", 0)), int(last.get("time", 0) * 1000))
    halted_ms = int(logged.get("halted_ms", 0)) if logged["halted"] else 0
    skipped = count_skipped(read_steps(settings.run_dir / "metrics.jsonl"))
    return {
        **facts,
        "run_state": state,
        "skipped_steps": skipped.steps,
        "skipped_groups": skipped.groups,
        "why": why,
        "ended": end.time if end and not halted_ms else (halted_ms or newest_ms) / 1000 or None,
        "last_step": dict(last) or None,
        "results": [name for name in RESULTS if (settings.run_dir / name).exists()],
        "run_dir": str(settings.run_dir),
    }


def _how(facts: Mapping[str, Any], logged: Mapping[str, Any], error: str) -> tuple[str, str]:
    """Return the state of a run that is over, and why it ended."""
    version, steps = facts["version"], facts["steps"]
    if version >= steps:
        return "done", f"all {steps} steps were made"
    if logged["halted"]:
        return f"halted: {logged['halted']}", explain_halt(logged["halted"], logged["drop_details"])
    if logged["draining"]:
        prompts = logged.get("prompts", -1)
        if 0 <= prompts <= (logged.get("issued") or 0):
            return "drained", f"its {prompts} prompts ran out"
        return "drained", "it was drained"
    if error:
        return "failed", error
    return "stopped", "it was interrupted; the same `tether up` continues from the last step"


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
