"""Collects the state of a run as plain data, for `tether status`, the monitor's page and scripts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.ledger.interface import Ledger, LedgerStatus, Peer
from services.observability.durations import rate_text
from services.observability.service_rows import NEEDED, describe_process

OCCUPANCY = ("running", "kv_use")
"""Occupancy reported by an engine's worker: running requests and KV cache share; null if unknown."""
PREFIX_HITS = "prefix_hits"
"""Share of all prompt tokens found in the engine's prefix cache; null before the first prompt."""
DRAFTS = ("drafts_accepted", "draft_digest")
"""Share of drafted tokens that the engine accepted (null without drafts), and digest of the engine's draft
tensors that versions do not change (null without such tensors)."""


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Steps of a run that the optimizer skipped."""

    steps: int
    groups: int
    """Number of groups in these steps: committed as trained, without changing a weight."""

    def __str__(self) -> str:
        return f"{self.steps} skipped step{'s' if self.steps != 1 else ''} of {self.groups} groups"


async def collect_status(ledger: Ledger) -> dict[str, Any]:
    """Return counters, groups by state, processes and engines of a run, as JSON types.

    Raises:
        Refused: NO_RUN, the ledger has no such run.
    """
    status = await ledger.status()
    peers = await ledger.peers()
    alive = {peer.incarnation: peer.info for peer in peers}
    return {
        "run_state": run_state(status),
        "version": status.version,
        "steps": status.steps,
        "epoch": status.epoch,
        "bound": _bound(status.bound),
        "pending_bound": _bound(status.pending) if status.pending else None,
        "issued": status.issued,
        "trained": status.trained,
        "dropped": status.dropped,
        "active": status.active,
        "wasted_tokens": status.wasted_tokens,
        "groups": {str(state): count for state, count in status.states.items()},
        "dropped_by_reason": dict(status.dropped_by_reason),
        "wasted_by_reason": dict(status.wasted_by_reason),
        "processes": [
            _process(peer) for peer in sorted(peers, key=lambda peer: str(peer.info.get("name", peer.role)))
        ],
        "engines": [
            {"engine": engine, "epoch": epoch, "version": version}
            | {name: alive[engine].get(name) for name in (*OCCUPANCY, PREFIX_HITS, *DRAFTS)}
            for engine, (epoch, version) in sorted(status.engines.items())
            if engine in alive
        ],
    }


def _process(peer: Peer) -> dict[str, Any]:
    """Return the shown fields of a process."""
    return {
        "service": peer.role,
        "name": peer.info.get("name", peer.role),
        "pid": peer.info.get("pid"),
        "host": peer.info.get("host"),
        "incarnation": peer.incarnation,
        "http": peer.info.get("http"),
        "page": peer.info.get("page"),
        "waits": peer.info.get("waits", {}),
        "work": peer.info.get("work", {}),
        "activity": describe_process("", peer).phrase(),
    }


def run_state(status: LedgerStatus) -> str:
    """Return done, halted (with the reason), draining or running."""
    if status.halted:
        return f"halted: {status.halted}"
    return "done" if status.done else "draining" if status.draining else "running"


def _bound(bound: Any) -> dict[str, Any]:
    return {
        "max_staleness": bound.max_staleness,
        "groups_per_step": bound.groups_per_step,
        "policy": str(bound.policy),
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def drops(facts: Mapping[str, Any]) -> str:
    """Format the number of dropped groups by reason, with their tokens if known."""
    wasted = facts.get("wasted_by_reason", {})
    return ", ".join(
        f"{reason} {count}" + (f" ({wasted[reason]} tokens)" if wasted.get(reason) else "")
        for reason, count in facts["dropped_by_reason"].items()
    )


def _occupancy(engine: dict[str, Any]) -> str:
    running, use = (engine[name] for name in OCCUPANCY)
    return (f", {running} running" if running is not None else "") + (
        f", KV cache {use:.0%}" if use is not None else ""
    )


def _pace(status: Mapping[str, Any]) -> str:
    """Format reward, speed and remaining time as in the live view."""
    step, each = status["last_step"], status.get("seconds_per_step")
    reward, tokens, seconds = (step.get(name) for name in ("reward_mean", "trained_tokens", "step_s"))
    remaining_steps = status["steps"] - status["version"]
    parts = [
        f"reward {reward:.3f}" if reward is not None else "",
        f"{tokens / seconds:.0f} tokens/s" if tokens is not None and seconds else "",
        rate_text(each, remaining_steps) if each is not None and status["run_state"] == "running" else "",
    ]
    return "  ".join(filter(None, parts))


def _staleness(step: Mapping[str, Any]) -> str:
    """Format the staleness of a step's tokens; unmeasured values are dashes."""
    lag, most, share = (
        "-" if step[name] is None else format(step[name], form)
        for name, form in (("lag_mean", ".2f"), ("lag_max", "d"), ("masked_share", ".1%"))
    )
    return f"step to version {step['version']}: lag mean {lag} max {most}, masked tokens {share}"


def warnings_of(status: Mapping[str, Any]) -> list[str]:
    """Return warning lines for `tether status` about skipped steps, which count as trained."""
    if not status.get("skipped_steps"):
        return []
    skipped = SkippedSteps(status["skipped_steps"], status["skipped_groups"])
    return [f"warning: {skipped}, counted as trained, changed no weights"]


def _missing_workers(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each needed role without a process in a running run."""
    services = {process["service"] for process in status["processes"]}
    missing = [role for role in NEEDED if role not in services and status["run_state"] == "running"]
    return [f"no {role} worker: {role}s are scaled to 0, or not started" for role in missing]


def render_status(status: Mapping[str, Any]) -> str:
    """Format the merged results of `collect_status` and `step_facts`."""
    bound = status["bound"]
    lines = [
        f"{status['run_state']}: version {status['version']} of {status['steps']}, "
        f"bound E={bound['max_staleness']} B={bound['groups_per_step']} {bound['policy']}",
        f"groups: issued {status['issued']}, trained {status['trained']}, dropped {status['dropped']}, "
        f"active {status['active']} ({_counts(status['groups'])})",
    ]
    if status["pending_bound"]:
        pending = status["pending_bound"]
        lines.append(
            f"pending: E={pending['max_staleness']} B={pending['groups_per_step']} {pending['policy']}, "
            "as soon as rule F holds with it"
        )
    if status.get("last_step"):
        lines += [_pace(status), _staleness(status["last_step"])]
    if status.get("bottleneck"):
        lines.append(status["bottleneck"])
    lines += [*warnings_of(status), *_missing_workers(status)]
    if status["dropped_by_reason"]:
        lines.append(f"dropped: {drops(status)}")
    lines += [
        f"engine {item['engine']}: version {item['version']} of epoch {item['epoch']}{_occupancy(item)}"
        for item in status["engines"]
    ]
    for item in status["processes"]:
        lines.append(
            f"{item['name']:<12} pid {item['pid']} on {item['host']}"
            + (f", {item['page']}" if item["page"] else "")
            + f", {item['activity']}"
        )
    return "\n".join(lines)
