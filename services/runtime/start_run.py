"""Creates a run in the ledger, or resumes it with its changed settings."""

import asyncio
from collections.abc import Iterator, Sequence

from protocol.errors import Reason, Refused, SettingsError
from protocol.lifecycle import GroupState
from protocol.staleness import Bound
from services.ledger.interface import Ledger, LedgerStatus, RunSpec
from services.runtime.frozen_models import checked_digests, record_digests
from services.runtime.run_ledger import status_if_created
from services.settings.load import FILE, dump_settings
from services.settings.resume import Change, changes_since_last_start, check_drained, keep_earlier
from services.settings.resume_rules import ResumeRule
from services.settings.sections import Settings
from trainer.storage.checkpoints import Checkpoints

BOUND_SETTINGS = {
    "bound.max_staleness": "max_staleness",
    "bound.groups_per_step": "groups_per_step",
    "bound.staleness_policy": "policy",
}
"""Setting -> field of `Bound`."""


async def start_or_resume(ledger: Ledger, settings: Settings, spec: RunSpec) -> Sequence[str]:
    """Create the run, or apply the current settings to the ledger; then write RUN_DIR/settings.json.

    Returns:
        Lines for the user: the bound in force, and changes since the last start.

    Raises:
        SettingsError: a fixed setting changed; ledger and settings.json are unchanged.
    """
    changes = changes_since_last_start(settings)
    digests = await asyncio.to_thread(checked_digests, settings)
    before = await status_if_created(ledger)
    if before is not None:
        states = before.states
        check_drained(changes, states.get(GroupState.SCORED, 0) + states.get(GroupState.TAKEN, 0))
        check_steps(spec.steps, before.version, before.steps)
    try:
        await ledger.create(spec)
    except Refused as refusal:
        if refusal.reason is not Reason.RUN_MISMATCH:
            raise
        raise SettingsError(
            f"run {spec.run} was {refusal.detail}, and cannot change to prompts {spec.fingerprint} "
            f"({'without end' if spec.prompts is None else spec.prompts}): give it the old prompts, or "
            "start a new run in another directory, on a shared ledger under another run.name"
        ) from None
    if before is not None and (before.pending or before.bound) != spec.bound:
        await ledger.set_bound(
            max_staleness=spec.bound.max_staleness,
            groups_per_step=spec.bound.groups_per_step,
            policy=spec.bound.policy,
        )
    await ledger.drain(False)
    if before is not None:
        await asyncio.to_thread(keep_earlier, settings.run_dir, before.sequence, changes)
    dump_settings(settings, settings.run_dir / FILE)
    record_digests(settings.run_dir, digests)
    after = await ledger.status()
    return [
        describe_start(settings, after),
        *(() if before is None else describe_changes(settings, changes, before)),
    ]


def describe_start(settings: Settings, status: LedgerStatus) -> str:
    """Return one line with the run's name, directory, length, version and bound."""
    pending = (
        f"; pending until rule F holds with it: {_describe_bound(status.pending)}" if status.pending else ""
    )
    position = f", resumes at version {status.version}" if status.version else ""
    return (
        f"run {settings.run.name} in {settings.run_dir}: {status.steps} steps, "
        f"{_describe_bound(status.bound)}{position}{pending}"
    )


def describe_changes(settings: Settings, changes: Sequence[Change], before: LedgerStatus) -> Iterator[str]:
    """Yield a line with the changes since the last start, and a line for steps that must be repeated.

    Args:
        settings: current settings.
        changes: differences from the settings of the last start; the bound is compared with the bound in
            force.
        before: ledger status before the start.
    """
    bound = settings.bound.bound
    listed = [change for change in changes if change.dotted not in (*BOUND_SETTINGS, "run.steps")]
    listed += [
        Change(dotted, getattr(before.bound, name), getattr(bound, name))
        for dotted, name in BOUND_SETTINGS.items()
        if getattr(before.bound, name) != getattr(bound, name)
    ]
    if before.steps != settings.run.steps:
        listed.append(Change("run.steps", before.steps, settings.run.steps))
    if listed:
        yield f"changed since the last start: {', '.join(map(str, listed))}"
    found = Checkpoints(settings.run_dir / "checkpoints", keep=1).latest(verify=False)
    first = found.version if found else 0
    if before.version > first and any(
        change.rule in (ResumeRule.REPEATED, ResumeRule.DRAINED) for change in listed
    ):
        yield (
            f"steps {first} to {before.version - 1} have no checkpoint: where they come out different now, "
            "they are made again"
        )


def check_steps(steps: int, made: int, before: int) -> None:
    """Reject fewer steps than a run has made.

    Args:
        steps: `run.steps` of the settings.
        made: number of steps that the run has made.
        before: `run.steps` of the run's last start.

    Raises:
        SettingsError: the run has made more steps; the message has all three numbers.
    """
    if steps < made:
        raise SettingsError(
            f"setting run.steps: {steps} is below the {made} steps that the run has made; "
            f"it was started with {before}"
        )


def _describe_bound(bound: Bound) -> str:
    return f"E={bound.max_staleness}, B={bound.groups_per_step}, {bound.policy}"
