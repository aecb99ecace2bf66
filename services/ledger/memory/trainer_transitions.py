"""The trainer's transitions on a `RunState`: claim, resume, take, commit, and what a checkpoint lets go."""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from protocol.errors import Reason, Refused
from protocol.lifecycle import Event, GroupState
from protocol.staleness import Policy, holds, lag, straggler, trainable_counts
from services.ledger.interface import RunSpec, Snapshot, StepRecord, Taken, TakenGroup, check_spec
from services.ledger.memory.run_state import Group, RunState
from services.ledger.redis.json_codec import encode_counts
from services.ledger.redis.keys import padded

_S = GroupState


def claim(book: RunState, epoch: str) -> None:
    """A new trainer takes the run over; see `Ledger.claim`."""
    if epoch == book.epoch:
        return
    if epoch in book.epochs:
        book.fence(epoch)
    book.epochs.add(epoch)
    book.epoch, book.running = epoch, None
    untaken = sorted(book.of(_S.TAKEN), key=lambda group: (group.deadline, group.group))
    for group in untaken:
        book.transition(group, Event.UNTAKE)
    book.append("claim", epoch=epoch, **({"untaken": [group.group for group in untaken]} if untaken else {}))
    book.apply_pending()


def resume(book: RunState, epoch: str, version: int, digest: int) -> bool:
    """Go on with the branch, or rewind; see `Ledger.resume`."""
    book.fence(epoch)
    if book.resumed[0] == epoch:
        if book.resumed[1:3] == (version, digest):
            return book.resumed[3]
        raise Refused(Reason.WRONG_STATE, f"epoch {epoch} has resumed at version {book.resumed[1]}")
    if not book.checkpoint <= version <= book.version:
        raise Refused(Reason.WRONG_STATE, f"version {version} is not in {book.checkpoint}..{book.version}")
    known = book.digest
    if version < book.version:
        known = book.steps[version - 1].digest if version - 1 in book.steps else digest
    continued = version == book.version and (version == 0 or known == digest)
    book.resumed = (epoch, version, digest, continued)
    book.digest = digest
    if continued:
        book.lineage.add(epoch)
        book.append("resume", epoch=epoch, version=version, digest=str(digest), continued=True)
    else:
        waiting = _rewind(book, version, version if known == digest else version - 1)
        if version - 1 in book.steps:
            book.steps[version - 1] = replace(book.steps[version - 1], digest=digest)
        book.lineage = {epoch}
        values = {"waiting": waiting} if waiting else {}
        book.append("resume", epoch=epoch, version=version, digest=str(digest), continued=False, **values)
        book.apply_pending()
    return continued


def _rewind(book: RunState, version: int, newest: int) -> list[int]:
    """Undo everything after `version`; tokens of versions over `newest` are of no use any more."""
    waiting = []
    for group in book.of(_S.LEASED, _S.SCORED, _S.TRAINED):
        if group.state is _S.SCORED and all(v <= newest for v, n in group.counts.items() if n):
            continue
        if group.state is _S.TRAINED:
            if group.step < version:
                continue
            book.trained -= 1
        book.transition(group, Event.REWIND)
        group.attempt, group.previous, group.why = 0, "", ""
        waiting.append(group.group)
    book.steps = {step: record for step, record in book.steps.items() if step < version}
    book.step_reports = {step: report for step, report in book.step_reports.items() if step < version}
    book.version, book.manifest = version, None
    return waiting


def take(book: RunState, epoch: str) -> Taken:
    """The batch of the next step; see `Ledger.take`."""
    book.fence(epoch)
    if book.running is not None:
        return book.running
    if book.resumed[0] != epoch:
        raise Refused(Reason.WRONG_STATE, f"epoch {epoch} has not resumed")
    if book.version >= book.spec.steps:
        raise Refused(Reason.DONE, f"{book.spec.steps} steps")
    if book.draining:
        book.expire_leases()
    book.apply_pending()
    if book.bound.policy is Policy.MASK:
        _drop_stale(book)
    batch = _choose(book)
    _settle_stragglers(book, batch)
    for group in batch:
        book.transition(group, Event.TAKE)
    book.running = Taken(book.version, tuple(group.taken() for group in batch), tuple(book.unreported_drops))
    book.unreported_drops = []
    book.append("take", epoch=epoch, step=book.version, groups=[group.group for group in batch])
    return book.running


def _drop_stale(book: RunState) -> None:
    def last_step(group: Group) -> float:
        return max((v for v, n in group.counts.items() if n), default=-1_000_000_000) + group.max_staleness

    for group in sorted(book.scored(), key=lambda group: (last_step(group), group.group)):
        if not trainable_counts(book.version, group.counts, group.max_staleness):
            book.drop(group, "stale")
            book.unreported_drops.append(group.group)


def _choose(book: RunState) -> list[Group]:
    """The scored groups to take: B, or all there are if no more can come."""
    scored, wanted = book.scored(), book.bound.groups_per_step
    if len(scored) < wanted:
        blocked = (book.pending is not None or book.draining) and not book.live()
        ended = book.exhausted() and not book.of(_S.LEASED, _S.WAITING)
        if not (blocked or ended):
            raise Refused(Reason.NOT_ENOUGH, f"{len(scored)} of {wanted} groups are scored")
        if not scored:
            raise Refused(Reason.EXHAUSTED, "no group is left")
    return scored[:wanted]


def _settle_stragglers(book: RunState, batch: list[Group]) -> None:
    """Wait for, or give up, unscored groups that could not be on time any more once `batch` is taken."""
    taken = {group.group for group in batch}
    while book.bound.policy is not Policy.MASK:
        left = [group.deadline for group in (*book.live(), *book.scored()) if group.group not in taken]
        unscored = {padded(group.group): group.deadline for group in book.live()}
        late = straggler(unscored)
        if late is None or holds(left, book.version + 1, book.bound):
            return
        if book.bound.policy is Policy.WAIT:
            raise Refused(Reason.STRAGGLER, str(int(late)))
        book.drop(book.groups[int(late)], "straggler")
        book.unreported_drops.append(int(late))


def commit(
    book: RunState,
    epoch: str,
    step: int,
    trained: Mapping[int, Mapping[int, int]],
    *,
    digest: int,
    report: bytes,
    manifest: bytes,
) -> int:
    """All groups of the running step are trained; see `Ledger.commit`."""
    book.fence(epoch)
    if step in book.steps and book.steps[step].epoch == epoch:
        return step + 1
    running = book.running
    if running is None or running.step != step:
        raise Refused(Reason.STALE_STEP, f"step {step} is not the running one")
    if set(trained) != {group.group for group in running.groups}:
        raise Refused(Reason.WRONG_STATE, f"{sorted(trained)} committed, another set taken")
    for group in running.groups:
        _check_counts(group, step, trained[group.group])
    for group in running.groups:
        found = book.groups[group.group]
        book.transition(found, Event.COMMIT)
        found.step = step
        book.finish("")
    book.trained += len(running.groups)
    book.version, book.running, book.digest, book.manifest = step + 1, None, digest, manifest
    book.steps[step] = StepRecord(step, epoch, digest, running.groups)
    book.step_reports[step] = report
    book.append(
        "commit", epoch=epoch, step=step, version=step + 1, digest=str(digest),
        groups={str(group): encode_counts(counts) for group, counts in trained.items()}, issued=book.issued, trained=book.trained,
        dropped=book.dropped, active=book.issued - book.trained - book.dropped,
    )  # fmt: skip
    book.apply_pending()
    return book.version


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


def checkpointed(book: RunState, version: int, registered: Container[str]) -> None:
    """Forget what a durable checkpoint covers; see `Ledger.checkpointed`. `registered`: processes that are
    known."""
    if version > book.version:
        raise Refused(Reason.WRONG_STATE, f"version {version} is not committed; the run is at {book.version}")
    if version > book.checkpoint:
        for step in range(book.checkpoint, version):
            book.step_reports.pop(step, None)
        book.engines = {
            name: served
            for name, served in book.engines.items()
            if name in registered or served[1] >= version
        }
        book.checkpoint = version
        book.append("checkpoint", version=version)
    book.steps = {step: record for step, record in book.steps.items() if step >= book.checkpoint}
    for group in book.of(_S.TRAINED, _S.DROPPED):
        if group.state is _S.DROPPED or group.step < book.checkpoint:
            del book.groups[group.group]


def rebuild(book: RunState | None, spec: RunSpec, snapshot: Snapshot, clock: Callable[[], int]) -> RunState:
    """The run as `snapshot` says; `book` is what the ledger holds now, or None if the run is not there."""
    check_spec(spec)
    if book is not None and book.epoch == snapshot.epoch:
        return book
    found = -1 if book is None else book.sequence
    if found != snapshot.found:
        raise Refused(Reason.WRONG_STATE, f"the ledger is at event {found}, not at {snapshot.found}")
    new = RunState(spec, clock, spec.bound)
    new.version, new.digest, new.checkpoint = snapshot.version, snapshot.digest, snapshot.checkpoint
    new.epoch, new.epochs = snapshot.epoch, {*snapshot.epochs, snapshot.epoch}
    new.sequence, new.archived = snapshot.sequence, snapshot.after
    new.issued, new.trained, new.dropped = snapshot.issued, snapshot.trained, snapshot.dropped
    new.wasted_tokens, new.reasons = snapshot.wasted_tokens, Counter(snapshot.reasons)
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
    lists = {
        "scored": [group.group for group in snapshot.scored],
        "waiting": list(snapshot.waiting),
        "told": list(snapshot.told),
    }
    new.append(
        "rebuild", epoch=snapshot.epoch, after=snapshot.after, version=new.version, issued=new.issued, trained=new.trained,
        dropped=new.dropped, **{name: values for name, values in lists.items() if values},
    )  # fmt: skip
    return new


def _held(group: TakenGroup, state: GroupState, snapshot: Snapshot) -> Group:
    return Group(
        group.group, state, group.token, deadline=group.deadline, max_staleness=group.max_staleness, version=group.version,
        attempt=snapshot.attempts.get(group.group, 1), counts=dict(group.counts),
    )  # fmt: skip
