"""Enforces the one reproducible order of work in runs with `run.deterministic` and `run.lockstep`.

Step k trains groups kB to (k + 1)B - 1, all generated with version max(0, k - E). The ledger leases groups in
order, and rule F leaves room for only the next E steps. Two waits therefore suffice. The first step waits for
the groups of the first E + 1 steps. Version k is committed once the groups of step k + E - 1 are scored,
which are the last groups that engines generate with version k - 1. No engine changes its weights while it
generates, and a group that is leased again gets the same version again.
"""

import logging

from protocol.lifecycle import GroupState
from services.ledger.interface import TakenBatch
from services.runtime.process import Process
from services.settings.sections import BoundConfig

log = logging.getLogger("tether.trainer")

NO_REPEAT_REMEDY = (
    "with run.deterministic no other may come instead, so this run cannot be repeated; restart it with "
    "run.deterministic=false, or start a new one"
)
POLL_S = 0.02
"""Seconds between two reads of the ledger."""


async def wait_for_groups_before(process: Process, version: int) -> bool:
    """Wait until every group that engines generate before `version` is scored.

    Returns:
        False if the groups will not be scored: the process is to stop, or the run drains.
    """
    settings = process.settings
    bound, steps = settings.bound, settings.run.steps
    due_groups = min(version + bound.max_staleness, steps) * bound.groups_per_step
    with process.waiting(f"the groups before version {version}"):
        while not process.stop.is_set():
            status = await process.ledger.status()
            scored = status.trained + status.states[GroupState.SCORED] + status.states[GroupState.TAKEN]
            if scored >= due_groups and not status.dropped:
                return True
            if status.draining:
                return False
            if status.dropped and not status.halted:
                cause = f"groups were dropped ({', '.join(status.dropped_by_reason)}): {NO_REPEAT_REMEDY}"
                log.error("run.halted cause=%s", cause)
                await process.ledger.halt(status.epoch, cause)
            await process.stopped_within(POLL_S)
    return False


def find_misplaced_group(batch: TakenBatch, bound: BoundConfig) -> str:
    """Return which group of a batch is out of order, and why; empty if all groups are in order."""
    first, version = batch.step * bound.groups_per_step, max(0, batch.step - bound.max_staleness)
    for number, taken in enumerate(batch.groups, first):
        if taken.group != number or taken.version != version:
            return (
                f"step {batch.step} got group {taken.group} of version {taken.version} in the place of group "
                f"{number} of version {version}: {NO_REPEAT_REMEDY}"
            )
    return ""
