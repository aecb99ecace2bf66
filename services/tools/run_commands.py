"""Queries and changes a run for the `tether` command, through its ledger or, after its end, its files."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from protocol.errors import Reason, Refused, SettingsError, Unavailable
from protocol.staleness import Bound, Policy
from protocol.validation import check_range
from services.ledger.embedded_server import read_endpoint
from services.ledger.redis.ledger import RedisLedger
from services.observability.status import collect_status, drops, render_status, warnings_of
from services.run_record.end import describe_ended_run, is_up
from services.run_record.page_key import add_key
from services.run_record.steps import step_facts
from services.runtime.run_ledger import open_ledger
from services.settings.load import run_settings
from services.settings.sections import Settings

STEP_FIELDS = ("reward_mean", "lag_mean", "lag_max", "trained_tokens", "loss")


def render_ended_run(facts: Mapping[str, Any]) -> str:
    """Format the result of `describe_ended_run`."""
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
    """Return a sentence that rejects a command for running runs, because the run has ended."""
    when = f" on {_clock(facts['ended'])}" if facts["ended"] else ""
    more = " with more --steps" if facts["run_state"] == "done" else ""
    return (
        f"run {facts['run']} is not running; it {_verb(facts['run_state'])} at version {facts['version']} of "
        f"{facts['steps']}{when}; `tether {command}` changes a running run, so start it first: "
        f"`tether up`{more}"
    )


def describe_step(line: Mapping[str, Any]) -> str:
    """Format the main numbers of a step as one line."""
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


T = TypeVar("T")
Facts = dict[str, Any]
BOUND_KEYS = {
    "max-staleness": "max_staleness",
    "groups-per-step": "groups_per_step",
    "staleness-policy": "policy",
}
"""Key of `tether set` -> argument of `Ledger.set_bound`."""
ELSEWHERE = "if the run uses an external ledger, set TETHER_REDIS_URL"
"""Hint for a run without a ledger in its directory: settings.json does not name the server."""


def read_status(run_dir: Path) -> Facts:
    """Return the state of a run from its ledger or, after its end, from its files.

    Raises:
        SettingsError: there is no such run, or it runs and its ledger does not answer yet.
    """
    settings = _settings(run_dir)
    if _is_over(settings):
        facts = describe_ended_run(settings)
        if facts["run_state"] == "stopped" and not _has_ledger(settings):
            facts["why"] += f"; {ELSEWHERE}"
        return facts
    try:
        facts = _call(settings, collect_status)
        facts |= step_facts(run_dir, is_over=facts["run_state"] == "done")
    except Unavailable:
        facts = describe_ended_run(settings)
        if facts["run_state"] == "done" or facts["run_state"].startswith("halted"):
            return facts
        raise
    monitor = settings.monitor
    for process in filter(itemgetter("page"), facts["processes"]):
        process["page"] = add_key(process["page"], monitor.host, monitor.key_file, settings.run_dir)
    return facts


def render_run_status(facts: Facts) -> str:
    """Format the result of `read_status`."""
    return render_ended_run(facts) if "why" in facts else render_status(facts)


def change_bound(run_dir: Path, name: str, value: str) -> str:
    """Change E, B or the policy of a running run; return a line about the change.

    Raises:
        SettingsError: the value is invalid, or the run is over.
    """
    if name not in BOUND_KEYS:
        raise SettingsError(
            f"{name!r} cannot be set while a run is on; choose one of {', '.join(BOUND_KEYS)}"
        )
    key = BOUND_KEYS[name]
    try:
        parsed: Any = Policy(value) if key == "policy" else int(value)
    except ValueError:
        wanted = f"one of {', '.join(Policy)}" if key == "policy" else "a whole number"
        raise SettingsError(f"{name} {value!r} is not {wanted}") from None
    if isinstance(parsed, int):
        check_range(Bound, key, parsed, name)
    if _settings(run_dir).is_lockstep:
        raise SettingsError(f"{name} decides which tokens are trained: a run with run.deterministic keeps it")
    pending = _change(run_dir, "set", lambda ledger: ledger.set_bound(**{key: parsed}))
    return f"{name} {value}: {'pending until rule F holds with it' if pending else 'in force'}"


def drain_run(run_dir: Path, off: bool) -> str:
    """Stop or resume leasing in a running run; return a line about it.

    Raises:
        SettingsError: the run is over.
    """
    _change(run_dir, "drain", lambda ledger: ledger.drain(not off))
    if off:
        return "leases are granted again"
    return "draining: no more leases are granted; the run ends with what is in flight"


def refuse_if_over(run_dir: Path, command: str) -> None:
    """Reject a command for running runs if the run is over.

    Raises:
        SettingsError: the run is over; the message says how and when it ended.
    """
    settings = _settings(run_dir)
    if _is_over(settings):
        hint = "" if _has_ledger(settings) else f"; {ELSEWHERE}"
        raise SettingsError(refusal(describe_ended_run(settings), command) + hint)


def _change(run_dir: Path, command: str, call: Callable[[RedisLedger], Awaitable[T]]) -> T:
    """Call a function with the ledger of a run, once the ledger is known to hold all acknowledged writes."""
    refuse_if_over(run_dir, command)
    settings = _settings(run_dir)

    async def guarded(ledger: RedisLedger) -> T:
        await ledger.guard()
        if (await ledger.status()).done:
            raise SettingsError(refusal(describe_ended_run(settings), command))
        return await call(ledger)

    return _call(settings, guarded)


def _settings(run_dir: Path) -> Settings:
    """Return the settings of a run, with retries of the ledger disabled."""
    return run_settings(run_dir, ["ledger.retry_s=0", "ledger.timeout_s=3"])


def _is_over(settings: Settings) -> bool:
    """Return whether a run with an embedded ledger is not running."""
    return not settings.ledger.url and not is_up(settings.run_dir)


def _has_ledger(settings: Settings) -> bool:
    """Return whether the location of a run's ledger is known."""
    return bool(settings.ledger.url) or read_endpoint(settings.run_dir / "ledger") is not None


def _call(settings: Settings, call: Callable[[RedisLedger], Awaitable[T]]) -> T:
    if not _has_ledger(settings):
        raise SettingsError(
            f"run {settings.run.name} is starting and has no ledger yet: ask again in a moment; {ELSEWHERE}"
        )

    async def body() -> T:
        async with open_ledger(settings) as ledger:
            return await call(ledger)

    try:
        return asyncio.run(body())
    except Unavailable as error:
        if settings.ledger.url:
            raise
        raise Unavailable(f"run {settings.run.name} is starting or stopping: {error}") from None
    except Refused as refused:
        if refused.reason is Reason.NO_RUN:
            raise SettingsError(f"the ledger has no run {settings.run.name!r}: was it started?") from None
        raise
