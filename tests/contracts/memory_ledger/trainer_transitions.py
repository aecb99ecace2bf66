"""Applies the trainer's transitions to a run in memory: claim, resume, take, commit, checkpoint and rebuild.

Each function is one transition of `MemoryLedger`, pure but for the `RunState` that it changes.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from protocol.errors import Reason, Refused
from protocol.lifecycle import Event, GroupState
from protocol.staleness import Policy, holds, lag, trainable_counts
from services.ledger.event_log.events import (
    CheckpointEvent,
    ClaimEvent,
    CommitEvent,
    PublishEvent,
    RebuildEvent,
    ResumeEvent,
    TakeEvent,
)
from services.ledger.interface import RunSpec, Snapshot, StepRecord, TakenBatch, TakenGroup
from services.ledger.limits import check_spec
from tests.contracts.memory_ledger.run_state import Group, RunState

_S = GroupState


def claim(run: RunState, epoch: str) -> None:
    """Make `epoch` the one that holds the run; see `Ledger.claim`."""
    if epoch == run.epoch:
        return
    if epoch in run.epochs:
        run.fence(epoch)
    run.epochs.add(epoch)
    run.epoch, run.running = epoch, None
    untaken = sorted(run.of(_S.TAKEN), key=lambda group: (group.deadline, group.group))
    for group in untaken:
        run.transition(group, Event.UNTAKE)
    run.append(ClaimEvent(epoch=epoch, untaken=[group.group for group in untaken]))
    run.apply_pending()


def publish(run: RunState, epoch: str, manifest: bytes, version: int) -> None:
    """Set the manifest of a committed version; see `Ledger.publish`."""
    run.fence(epoch)
    if version > run.version:
        raise Refused(Reason.WRONG_STATE, f"version {version} is not committed; the run is at {run.version}")
    if run.manifest != manifest:
        run.manifest, run.published = manifest, version
        run.append(PublishEvent(epoch=epoch, version=version))


def resume(run: RunState, epoch: str, version: int, digest: int) -> bool:
    """Continue the branch (True), or rewind to `version` (False); see `Ledger.resume`."""
    run.fence(epoch)
    if run.resumed[0] == epoch:
        if run.resumed[1:3] == (version, digest):
            return run.resumed[3]
        raise Refused(Reason.WRONG_STATE, f"epoch {epoch} has resumed at version {run.resumed[1]}")
    if not run.checkpoint <= version <= run.version:
        raise Refused(Reason.WRONG_STATE, f"version {version} is not in {run.checkpoint}..{run.version}")
    recorded = run.digest
    if version < run.version:
        recorded = run.steps[version - 1].digest if version - 1 in run.steps else digest
    continued = version == run.version and (version == 0 or recorded == digest)
    run.resumed = (epoch, version, digest, continued)
    run.digest = digest
    if continued:
        run.lineage.add(epoch)
        run.append(ResumeEvent(epoch=epoch, version=version, digest=str(digest), continued=True))
    else:
        waiting = _rewind(run, version, version if recorded == digest else version - 1)
        if version - 1 in run.steps:
            run.steps[version - 1] = replace(run.steps[version - 1], digest=digest)
        run.lineage = {epoch}
        run.append(
            ResumeEvent(epoch=epoch, version=version, digest=str(digest), continued=False, waiting=waiting)
        )
        run.apply_pending()
    return continued


def _rewind(run: RunState, version: int, newest: int) -> list[int]:
    """Undo everything after `version`, and scored groups with a token of a version over `newest`."""
    waiting = []
    for group in run.of(_S.LEASED, _S.SCORED, _S.TRAINED):
        if group.state is _S.SCORED and all(v <= newest for v, n in group.counts.items() if n):
            continue
        if group.state is _S.TRAINED:
            if group.step < version:
                continue
            run.trained -= 1
        run.transition(group, Event.REWIND)
        group.attempt, group.previous, group.release_reason = 0, "", ""
        waiting.append(group.group)
    run.steps = {step: record for step, record in run.steps.items() if step < version}
    run.step_reports = {step: report for step, report in run.step_reports.items() if step < version}
    run.version, run.manifest, run.published = version, None, -1
    return waiting


def take(run: RunState, epoch: str) -> TakenBatch:
    """Take the batch of the next step; see `Ledger.take`."""
    run.fence(epoch)
    if run.running is not None:
        return run.running
    if run.resumed[0] != epoch:
        raise Refused(Reason.WRONG_STATE, f"epoch {epoch} has not resumed")
    if run.version >= run.spec.steps:
        raise Refused(Reason.DONE, f"{run.spec.steps} steps")
    if run.draining:
        run.expire_leases()
    run.apply_pending()
    if run.bound.policy is Policy.MASK:
        _drop_stale(run)
    batch = _select_batch(run)
    _resolve_stragglers(run, batch)
    for group in batch:
        run.transition(group, Event.TAKE)
    run.running = TakenBatch(
        run.version, tuple(group.taken() for group in batch), tuple(run.unreported_drops)
    )
    run.unreported_drops = []
    run.append(TakeEvent(epoch=epoch, step=run.version, groups=[group.group for group in batch]))
    return run.running


def _drop_stale(run: RunState) -> None:
    def last_step(group: Group) -> float:
        return max((v for v, n in group.counts.items() if n), default=-1_000_000_000) + group.max_staleness

    for group in sorted(run.scored(), key=lambda group: (last_step(group), group.group)):
        if not trainable_counts(run.version, group.counts, group.max_staleness):
            run.drop(group, "stale")
            run.unreported_drops.append(group.group)


def _select_batch(run: RunState) -> list[Group]:
    """Return the scored groups to take: B, or all there are if no more can come."""
    scored, count = run.scored(), run.bound.groups_per_step
    if len(scored) < count:
        blocked = (run.pending is not None or run.draining) and not run.live()
        ended = run.exhausted() and not run.of(_S.LEASED, _S.WAITING)
        if not (blocked or ended):
            raise Refused(Reason.NOT_ENOUGH, f"{len(scored)} of {count} groups are scored")
        if not scored:
            raise Refused(Reason.EXHAUSTED, "no group is left")
    return scored[:count]


def _resolve_stragglers(run: RunState, batch: list[Group]) -> None:
    """Refuse for, or drop, unscored groups that could not be on time any more once `batch` is taken."""
    taken = {group.group for group in batch}
    while run.bound.policy is not Policy.MASK:
        left = [group.deadline for group in (*run.live(), *run.scored()) if group.group not in taken]
        unscored = {f"{group.group:012d}": group.deadline for group in run.live()}
        late = straggler(unscored)
        if late is None or holds(left, run.version + 1, run.bound):
            return
        if run.bound.policy is Policy.WAIT:
            raise Refused(Reason.STRAGGLER, str(int(late)))
        run.drop(run.groups[int(late)], "straggler")
        run.unreported_drops.append(int(late))


def commit(
    run: RunState,
    epoch: str,
    step: int,
    trained: Mapping[int, Mapping[int, int]],
    *,
    digest: int,
    report: bytes,
    manifest: bytes,
) -> int:
    """Train all groups of the running step; see `Ledger.commit`."""
    run.fence(epoch)
    if step in run.steps and run.steps[step].epoch == epoch:
        return step + 1
    running = run.running
    if running is None or running.step != step:
        raise Refused(Reason.STALE_STEP, f"step {step} is not the running one")
    if set(trained) != {group.group for group in running.groups}:
        raise Refused(Reason.WRONG_STATE, f"{sorted(trained)} committed, another set taken")
    for group in running.groups:
        _check_counts(group, step, trained[group.group])
    for group in running.groups:
        found = run.groups[group.group]
        run.transition(found, Event.COMMIT)
        found.step = step
        run.finish("")
    run.trained, run.filtered = run.trained + len(running.groups), 0
    run.version, run.running, run.digest = step + 1, None, digest
    if manifest:
        run.manifest, run.published = manifest, step + 1
    run.steps[step] = StepRecord(step, epoch, digest, running.groups)
    run.step_reports[step] = report
    run.append(
        CommitEvent(
            epoch=epoch,
            step=step,
            version=step + 1,
            digest=str(digest),
            groups={group: dict(counts) for group, counts in trained.items()},
            issued=run.issued,
            trained=run.trained,
            dropped=run.dropped,
            active=run.issued - run.trained - run.dropped,
        )
    )
    run.apply_pending()
    return run.version


def _check_counts(group: TakenGroup, step: int, trained: Mapping[int, int]) -> None:
    for version, count in trained.items():
        if count > 0 and lag(step, version) > group.max_staleness:
            raise Refused(
                Reason.BOUND,
                f"group {group.group}: tokens of version {version} are over the bound at step {step}",
            )
        if count > group.counts.get(version, 0):
            raise Refused(
                Reason.WRONG_STATE,
                f"group {group.group}: more tokens of version {version} trained than accepted",
            )


def checkpointed(run: RunState, version: int, registered: Container[str]) -> None:
    """Forget steps and groups that a durable checkpoint covers; see `Ledger.checkpointed`.

    Args:
        run: the run.
        version: the checkpoint's version.
        registered: incarnations of the processes in the registry.
    """
    if version > run.version:
        raise Refused(Reason.WRONG_STATE, f"version {version} is not committed; the run is at {run.version}")
    if version > run.checkpoint:
        for step in range(run.checkpoint, version):
            run.step_reports.pop(step, None)
        run.engines = {
            name: served for name, served in run.engines.items() if name in registered or served[1] >= version
        }
        run.checkpoint = version
        run.append(CheckpointEvent(version=version))
    run.steps = {step: record for step, record in run.steps.items() if step >= run.checkpoint}
    for group in run.of(_S.TRAINED, _S.DROPPED):
        if group.state is _S.DROPPED or group.step < run.checkpoint:
            del run.groups[group.group]


def rebuild(run: RunState | None, spec: RunSpec, snapshot: Snapshot, clock: Callable[[], int]) -> RunState:
    """Return the run of `snapshot`; see `Ledger.rebuild`.

    Args:
        run: the ledger's present run; None if there is none.
        spec: the run; its bound is the one in force.
        snapshot: the contents that the ledger must have.
        clock: milliseconds.
    """
    check_spec(spec)
    if run is not None and run.epoch == snapshot.epoch:
        return run
    found = -1 if run is None else run.sequence
    if found != snapshot.found:
        raise Refused(Reason.WRONG_STATE, f"the ledger is at event {found}, not at {snapshot.found}")
    new = RunState(spec, clock, spec.bound)
    new.version, new.digest, new.checkpoint = snapshot.version, snapshot.digest, snapshot.checkpoint
    new.epoch, new.epochs = snapshot.epoch, {*snapshot.epochs, snapshot.epoch}
    new.sequence, new.archived = snapshot.sequence, snapshot.after
    new.issued, new.trained, new.dropped = snapshot.issued, snapshot.trained, snapshot.dropped
    new.wasted_tokens, new.reasons = snapshot.wasted_tokens, Counter(snapshot.reasons)
    new.wasted_by_reason = Counter(snapshot.wasted_by_reason)
    new.halted, new.draining = snapshot.halted, snapshot.draining
    new.steps = {record.step: record for record in snapshot.steps}
    new.step_reports = dict(snapshot.reports)
    for group in snapshot.scored:
        new.groups[group.group] = _held(group, _S.SCORED, snapshot)
    for number, attempt in snapshot.waiting.items():
        new.groups[number] = Group(number, attempt=attempt)
    for record in snapshot.steps:
        for group in record.groups:
            new.groups[group.group] = trained = _held(group, _S.TRAINED, snapshot)
            trained.step = record.step
    new.append(
        RebuildEvent(
            epoch=snapshot.epoch,
            after=snapshot.after,
            version=new.version,
            issued=new.issued,
            trained=new.trained,
            dropped=new.dropped,
            scored=[group.group for group in snapshot.scored],
            waiting=list(snapshot.waiting),
            journal_events=list(snapshot.journal_events),
        )
    )
    return new


def _held(group: TakenGroup, state: GroupState, snapshot: Snapshot) -> Group:
    return Group(
        group.group,
        state,
        group.token,
        deadline=group.deadline,
        max_staleness=group.max_staleness,
        version=group.version,
        attempt=snapshot.attempts.get(group.group, 1),
        counts=dict(group.counts),
    )


def straggler(unscored: Mapping[str, int]) -> str | None:
    """Return the unscored group with the earliest deadline, then the lowest id; None if there is none.

    The policy `drop` drops it first, and `wait` waits for it.

    Args:
        unscored: group id -> deadline.
    """
    return min(unscored, key=lambda group: (unscored[group], group), default=None)
