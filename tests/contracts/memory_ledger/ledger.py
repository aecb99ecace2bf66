"""Implements the ledger in memory: the oracle that the Redis one is checked against.

No method awaits anything, so each one is atomic within one event loop.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from protocol.errors import Reason, Refused
from protocol.ids import new_token
from protocol.lifecycle import Event, GroupState
from protocol.staleness import Bound, Policy, deadline
from services.ledger.event_log.events import (
    AcceptEvent,
    AppliedEvent,
    BoundPendingEvent,
    CreateEvent,
    DrainEvent,
    ExtendEvent,
    LeaseEvent,
    StepsEvent,
)
from services.ledger.interface import (
    Head,
    Lease,
    LedgerStatus,
    Peer,
    RunSpec,
    Snapshot,
    StepRecord,
    TakenBatch,
    TakenGroup,
)
from services.ledger.limits import ARCHIVE_LIMIT, check_bound, check_spec
from tests.contracts.memory_ledger import trainer_transitions as trainer
from tests.contracts.memory_ledger.event_fields import fields_of
from tests.contracts.memory_ledger.run_clock import RunClock
from tests.contracts.memory_ledger.run_state import Group, ProcessRegistry, RunState, bound_event

_S = GroupState


class MemoryLedger:
    """Ledger of one run; `services/ledger/interface.py` documents the methods."""

    def __init__(
        self,
        *,
        clock: Callable[[], int] | None = None,
        archive_limit: int = ARCHIVE_LIMIT,
        tokens: Callable[[], str] = new_token,
    ) -> None:
        """Make an empty ledger.

        Args:
            clock: the run's clock, milliseconds; a `RunClock` on the wall clock if None.
            archive_limit: events that may wait for the archive before leasing stops.
            tokens: draws lease tokens.
        """
        self.durability = "the ledger is in memory: it ends with this process"
        """What the ledger does not promise; see `RedisLedger.durability`."""
        self.clock = RunClock() if clock is None else clock
        """By which leases and registrations end, in milliseconds; it never goes back."""
        self._archive_limit = archive_limit
        self._tokens = tokens
        self._run_state: RunState | None = None
        self._registry = ProcessRegistry(self.clock)

    @property
    def run_state(self) -> RunState:
        """Return the state of the run. Refuses NO_RUN."""
        if self._run_state is None:
            raise Refused(Reason.NO_RUN, "the run was never created on this ledger")
        return self._run_state

    async def create(self, spec: RunSpec) -> None:
        check_spec(spec)
        run = self._run_state
        if run is None:
            self._run_state = run = RunState(spec, self.clock, spec.bound)
            run.append(
                CreateEvent(
                    fingerprint=spec.fingerprint,
                    prompts=-1 if spec.prompts is None else spec.prompts,
                    steps=spec.steps,
                    max_staleness=spec.bound.max_staleness,
                    groups_per_step=spec.bound.groups_per_step,
                    policy=spec.bound.policy,
                )
            )
            return
        if (run.spec.fingerprint, run.spec.prompts) != (spec.fingerprint, spec.prompts):
            count = "without end" if run.spec.prompts is None else run.spec.prompts
            raise Refused(Reason.RUN_MISMATCH, f"created with prompts {run.spec.fingerprint} ({count})")
        if spec.steps < run.version:
            raise Refused(Reason.WRONG_STATE, f"steps {spec.steps} is below version {run.version}")
        if spec.steps != run.spec.steps:
            run.append(StepsEvent(steps=spec.steps))
        run.spec = spec

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        self._run_state = trainer.rebuild(self._run_state, spec, snapshot, self.clock)

    async def status(self) -> LedgerStatus:
        return self.run_state.status()

    async def head(self) -> Head:
        run = self.run_state
        return Head(run.epoch, run.version, run.sequence, run.published)

    # -- engines and processes

    async def register(self, peer: Peer, ttl_ms: int) -> None:
        self._registry.entries[peer.incarnation] = (self.clock() + ttl_ms, peer)

    async def unregister(self, incarnation: str, *, refuted: bool = False) -> None:
        self._registry.forget(incarnation, refuted=refuted)
        if self._run_state is not None:
            self._run_state.engines.pop(incarnation, None)
            self._run_state.end_held(incarnation, refuted=refuted)

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        return [peer for peer in self._registry.live() if role is None or peer.role == role]

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        served = {peer.incarnation: peer.info.get("endpoints", {}) for peer in self._registry.live()}
        return {
            incarnation: endpoints[topic] for incarnation, endpoints in served.items() if topic in endpoints
        }

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        run = self.run_state
        self._registry.refuse_refuted(engine)
        if epoch not in run.lineage:
            raise Refused(Reason.STALE_EPOCH, f"epoch {epoch} is not of the current branch")
        if version > run.version:
            raise Refused(
                Reason.WRONG_STATE, f"version {version} is not committed; the run is at {run.version}"
            )
        known = run.engines.get(engine)
        if known is None or known[0] != epoch or known[1] < version:
            run.engines[engine] = (epoch, version)
            run.append(AppliedEvent(engine=engine, epoch=epoch, version=version))

    # -- a group's life

    async def lease(
        self, *, request: str, engine: str, holder: str, lease_ms: int, groups: int = -1
    ) -> Lease:
        run = self.run_state
        answered = run.requests.get(request)
        if answered is not None:
            return answered
        run.expire_leases()
        epoch, version = self._admit(run, engine)
        due = deadline(version, run.bound.max_staleness)
        group = self._next_group(run, lambda: run.check_room(engine, groups, version, due))
        run.transition(group, Event.LEASE)
        group.token, group.holder, group.version = self._tokens(), holder, version
        group.max_staleness, group.deadline = run.bound.max_staleness, due
        group.attempt += 1
        group.expires_ms = self.clock() + lease_ms
        run.append(
            LeaseEvent(
                group=group.group,
                token=group.token,
                holder=holder,
                engine=engine,
                epoch=epoch,
                version=version,
                deadline=group.deadline,
                bound=group.max_staleness,
                groups_per_step=run.bound.groups_per_step,
                policy=run.bound.policy,
                attempt=group.attempt,
            )
        )
        lease = Lease(
            group.group, group.token, epoch, version, group.deadline, group.max_staleness, group.attempt
        )
        run.requests.pop(group.request, None)
        group.request = request
        run.requests[request] = lease
        return lease

    def _admit(self, run: RunState, engine: str) -> tuple[str, int]:
        """Return epoch and version that `engine` serves; refuse if no lease is granted to it now."""
        if run.halted:
            raise Refused(Reason.HALTED, run.halted)
        if run.draining:
            raise Refused(Reason.DRAINING)
        if run.sequence - run.archived > self._archive_limit:
            raise Refused(Reason.ARCHIVE_BEHIND, f"{run.sequence - run.archived} events are not archived")
        self._registry.refuse_refuted(engine)
        epoch, version = run.engines.get(engine, ("", -1))
        if version < 0 or epoch not in run.lineage:
            raise Refused(Reason.STALE_ENGINE, f"{engine} serves epoch {epoch!r}")
        if not run.apply_pending():
            raise Refused(Reason.PENDING, "a change of the bound waits until rule F holds with it")
        return epoch, version

    def _next_group(self, run: RunState, check_room: Callable[[], None]) -> Group:
        """Return the group to lease; groups that have used up their attempts are dropped on the way."""
        if len(run.slot_deadlines()) >= (run.spec.steps - run.next_step()) * run.bound.groups_per_step:
            raise Refused(Reason.DONE)
        if not run.leasable() and run.exhausted():
            raise Refused(Reason.EXHAUSTED, f"{run.spec.prompts} prompts")
        check_room()
        for group in run.leasable():
            if group.attempt < run.spec.max_attempts:
                return group
            run.drop(group, "attempts", group.release_reason)
            if run.halted:
                raise Refused(Reason.HALTED, run.halted)
        if run.exhausted():
            raise Refused(Reason.EXHAUSTED, f"{run.spec.prompts} prompts")
        group = run.groups[run.issued] = Group(run.issued)
        run.issued += 1
        return group

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        run = self.run_state
        held_group = run.held(group, token)
        if held_group.state is not _S.LEASED:
            raise Refused(Reason.NOT_HELD, f"group {group} is {held_group.state}")
        run.expire_leases()
        self._readmit(run, held_group)
        run.transition(held_group, Event.EXTEND)
        held_group.expires_ms = self.clock() + lease_ms
        if held_group.expired:
            held_group.expired = False
            run.append(ExtendEvent(group=group, token=token))

    def _readmit(self, run: RunState, group: Group) -> None:
        if group.expired and not run.room_for([group.deadline]):
            raise Refused(Reason.BOUND, f"group {group.group} had expired and rule F has no room for it")

    async def release(self, group: int, token: str, reason: str) -> None:
        self._hand_back(group, token, Event.RELEASE, reason)

    def _hand_back(self, group: int, token: str, event: Event, reason: str) -> None:
        run = self.run_state
        known = run.groups.get(group)
        if known is not None and known.token != token and known.previous == token:
            return
        found = run.held(group, token)
        run.hand_back(found, event, reason)

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        run = self.run_state
        held_group = run.held(group, token, forgotten=Reason.DUPLICATE)
        if held_group.state in (_S.SCORED, _S.TAKEN, _S.TRAINED):
            return held_group.taken()
        if held_group.state is _S.LEASED:
            run.expire_leases()
            self._readmit(run, held_group)
        run.transition(held_group, Event.ACCEPT)
        held_group.counts = dict(counts)
        run.append(AcceptEvent(group=group, token=token, counts=dict(counts), reward=reward))
        return held_group.taken()

    async def lost(self, group: int, token: str) -> None:
        self._hand_back(group, token, Event.LOST, "lost")

    async def drop(self, group: int, token: str, reason: str, wasted: int = 0, detail: str = "") -> None:
        found = self.run_state.held(group, token)
        if found.state is not _S.DROPPED:
            self.run_state.drop(found, reason, detail, wasted)
            self.run_state.apply_pending()

    async def filter(self, group: int, token: str, tokens: int, reward: float, max_batches: int) -> None:
        self.run_state.filter(group, token, tokens, reward, max_batches)

    # -- the trainer

    async def claim(self, epoch: str) -> LedgerStatus:
        trainer.claim(self.run_state, epoch)
        return self.run_state.status()

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        return trainer.resume(self.run_state, epoch, version, digest)

    async def take(self, epoch: str) -> TakenBatch:
        return trainer.take(self.run_state, epoch)

    async def commit(
        self,
        epoch: str,
        step: int,
        trained: Mapping[int, Mapping[int, int]],
        *,
        digest: int,
        report: bytes,
        manifest: bytes,
    ) -> int:
        return trainer.commit(
            self.run_state, epoch, step, trained, digest=digest, report=report, manifest=manifest
        )

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        trainer.publish(self.run_state, epoch, manifest, version)

    async def halt(self, epoch: str, cause: str) -> None:
        self.run_state.fence(epoch)
        self.run_state.halt(cause)

    async def manifest(self) -> bytes | None:
        return self._run_state.manifest if self._run_state is not None else None

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        return (
            [record for step, record in sorted(self._run_state.steps.items()) if step >= first]
            if self._run_state
            else []
        )

    async def reports(self, first: int) -> Sequence[bytes]:
        return (
            [report for step, report in sorted(self._run_state.step_reports.items()) if step >= first]
            if self._run_state
            else []
        )

    async def checkpointed(self, version: int) -> None:
        trainer.checkpointed(self.run_state, version, self._registry.entries)

    async def ended(self, groups: Collection[int]) -> set[int]:
        return {group for group in groups if self.run_state.has_ended(group)}

    # -- settings

    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        check_bound(max_staleness, groups_per_step)
        run = self.run_state
        base = run.pending or run.bound
        bound = Bound(
            base.max_staleness if max_staleness is None else max_staleness,
            base.groups_per_step if groups_per_step is None else groups_per_step,
            base.policy if policy is None else policy,
        )
        run.expire_leases()
        if bound == run.bound:
            if run.pending is not None:
                run.pending = None
                run.append(bound_event(bound))
            return None
        is_pending, run.pending = bound == run.pending, bound
        if run.apply_pending():
            return None
        if not is_pending:
            run.append(
                BoundPendingEvent(
                    max_staleness=bound.max_staleness,
                    groups_per_step=bound.groups_per_step,
                    policy=bound.policy,
                )
            )
        return bound

    async def drain(self, on: bool = True) -> None:
        run = self.run_state
        if run.halted and not on:
            run.unhalt()
        if run.draining != on:
            run.draining = on
            run.append(DrainEvent(on=on))

    # -- the event log

    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        if self._run_state is None:
            return []
        new = itertools.dropwhile(lambda event: event.seq <= after, self._run_state.log)
        return [fields_of(event) for event in itertools.islice(new, limit)]

    async def archived(self, sequence: int) -> None:
        run = self.run_state
        if sequence > run.sequence:
            raise Refused(Reason.WRONG_STATE, f"event {sequence} is not written; the last is {run.sequence}")
        run.archived = max(run.archived, sequence)
        while run.log and run.log[0].seq <= run.archived:
            run.log.popleft()

    async def close(self) -> None: ...
