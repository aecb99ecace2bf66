"""Describes the state of a run from its directory alone."""

from collections.abc import Mapping
from typing import Any

from services.run_files.event_tail import EventTail
from services.settings.sections import Settings


def recorded_state(settings: Settings, last: Mapping[str, Any], tail: EventTail) -> dict[str, Any]:
    """Return what a run's files say of it, with the fields of `LiveState.collect`; no process is known.

    `last` is the newest line of metrics.jsonl.
    """
    logged = tail.state()
    version = max(int(last.get("version", 0)), logged["version"])
    steps = logged.get("steps", settings.run.steps)
    halted = logged["halted"]
    bound = logged["bound"] or {
        "max_staleness": settings.bound.max_staleness,
        "groups_per_step": settings.bound.groups_per_step,
        "policy": str(settings.bound.staleness_policy),
    }
    return {
        "run": settings.run.name,
        "source": "files",
        "run_state": "done" if version >= steps else f"halted: {halted}" if halted else "not running",
        "version": version,
        "steps": steps,
        "epoch": logged["epoch"] or last.get("epoch", ""),
        "bound": bound,
        "pending_bound": None,
        "issued": logged.get("issued"),
        "trained": logged.get("trained"),
        "dropped": logged.get("dropped"),
        "active": logged.get("active"),
        "wasted_tokens": None,
        "groups": {},
        "dropped_by_reason": logged["dropped_by_reason"],
        "wasted_by_reason": logged["wasted_by_reason"],
        "drops_since_event": logged["drops_since_event"],
        "processes": [],
        "engines": [],
    }
