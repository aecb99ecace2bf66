"""The ledger in memory: the oracle that the Redis one is checked against, and a ledger for tests that need no
server.

No method awaits anything: each one is atomic within one event loop.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.errors import Reason, Refused
from protocol.ids import new_token
from protocol.lifecycle import Event, GroupState
from protocol.staleness import Bound, Policy, admits, deadline
from services.ledger.interface import (
    ARCHIVE_LIMIT,
    Head,
    Lease,
    LedgerStatus,
    Peer,
    RunSpec,
    Snapshot,
    StepRecord,
    Taken,
    TakenGroup,
    check_bound,
    check_spec,
)
from services.ledger.memory.run_state import Group, Registry, RunState, bound_values
from services.ledger.memory.trainer_transitions import checkpointed, claim, commit, rebuild, resume, take
from services.ledger.redis.json_codec import encode_counts

_S = GroupState


def monotonic_ms() -> int:
    """The default clock."""
    return time.monotonic_ns() // 1_000_000


class MemoryLedger:
    """One run; see `services/ledger/interface.py` for what the methods promise."""

    def __init__(
        self,
        *,
        clock: Callable[[], int] = monotonic_ms,
        archive_limit: int = ARCHIVE_LIMIT,
        tokens: Callable[[], str] = new_token,
    ) -> None:
        """`clock` gives milliseconds; `tokens` draws lease tokens."""
        self.durability = "the ledger is in memory: it ends with this process"
        self._clock = clock
        self._archive_limit = archive_limit
        self._tokens = tokens
        self._book: RunState | None = None
        self._registry = Registry(clock)

    @property
    def book(self) -> RunState:
        """The state of the run. Refuses NO_RUN."""
        if self._book is None:
            raise Refused(Reason.NO_RUN, "the run was never created on this ledger")
        return self._book

    async def create(self, spec: RunSpec) -> None:
        check_spec(spec)
        book = self._book
        if book is None:
            self._book = book = RunState(spec, self._clock, spec.bound)
            book.append(
                "create", fingerprint=spec.fingerprint, prompts=-1 if spec.prompts is None else spec.prompts, steps=spec.steps,
                **bound_values(spec.bound),
            )  # fmt: skip
            return
        if (book.spec.fingerprint, book.spec.prompts) != (spec.fingerprint, spec.prompts):
            raise Refused(Reason.RUN_MISMATCH, f"created with prompts {book.spec.fingerprint}")
        if spec.steps < book.version:
            raise Refused(Reason.WRONG_STATE, f"steps {spec.steps} is below version {book.version}")
        if spec.steps != book.spec.steps:
            book.append("steps", steps=spec.steps)
        book.spec = spec

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        self._book = rebuild(self._book, spec, snapshot, self._clock)

    async def status(self) -> LedgerStatus:
        return self.book.status()

    async def head(self) -> Head:
        return Head(self.book.epoch, self.book.version, self.book.sequence)

    # -- engines and processes
    # ---------------------------------------------------------------------------------------
    async def register(self, peer: Peer, ttl_ms: int) -> None:
        self._registry.entries[peer.incarnation] = (self._clock() + ttl_ms, peer)

    async def unregister(self, incarnation: str) -> None:
        self._registry.entries.pop(incarnation, None)
        if self._book is not None:
            self._book.engines.pop(incarnation, None)

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        return [peer for peer in self._registry.live() if role is None or peer.role == role]

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        served = {peer.incarnation: peer.info.get("endpoints", {}) for peer in self._registry.live()}
        return {
            incarnation: endpoints[topic] for incarnation, endpoints in served.items() if topic in endpoints
        }

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        book = self.book
        if epoch not in book.lineage:
            raise Refused(Reason.STALE_EPOCH, f"epoch {epoch} is not of the current branch")
        if version > book.version:
            raise Refused(
                Reason.WRONG_STATE, f"version {version} is not committed; the run is at {book.version}"
            )
        known = book.engines.get(engine)
        if known is None or known[0] != epoch or known[1] < version:
            book.engines[engine] = (epoch, version)
            book.append("applied", engine=engine, epoch=epoch, version=version)

    # -- a group's life
    # ----------------------------------------------------------------------------------------------
    async def lease(self, *, request: str, engine: str, holder: str, lease_ms: int) -> Lease:
        book = self.book
        answered = book.requests.get(request)
        if answered is not None:
            return answered
        book.expire_leases()
        epoch, version = self._admit(book, engine)
        group = self._next_group(book, deadline(version, book.bound.max_staleness))
        book.transition(group, Event.LEASE)
        group.token, group.holder, group.version = self._tokens(), holder, version
        group.max_staleness, group.deadline = (
            book.bound.max_staleness,
            deadline(version, book.bound.max_staleness),
        )
        group.attempt += 1
        group.expires_ms = self._clock() + lease_ms
        book.append(
            "lease", group=group.group, token=group.token, holder=holder, engine=engine, epoch=epoch, version=version,
            deadline=group.deadline, bound=group.max_staleness, groups_per_step=book.bound.groups_per_step,
            policy=book.bound.policy.value, attempt=group.attempt,
        )  # fmt: skip
        lease = Lease(
            group.group, group.token, epoch, version, group.deadline, group.max_staleness, group.attempt
        )
        book.requests.pop(group.request, None)
        group.request = request
        book.requests[request] = lease
        return lease

    def _admit(self, book: RunState, engine: str) -> tuple[str, int]:
        """Epoch and version that `engine` serves, if leases are granted to it at all."""
        if book.halted:
            raise Refused(Reason.HALTED, book.halted)
        if book.draining:
            raise Refused(Reason.DRAINING)
        if book.sequence - book.archived > self._archive_limit:
            raise Refused(Reason.ARCHIVE_BEHIND, f"{book.sequence - book.archived} events are not archived")
        epoch, version = book.engines.get(engine, ("", -1))
        if version < 0 or epoch not in book.lineage:
            raise Refused(Reason.STALE_ENGINE, f"{engine} serves epoch {epoch!r}")
        if not book.apply_pending():
            raise Refused(Reason.PENDING, "a change of the bound waits until rule F holds with it")
        return epoch, version

    def _next_group(self, book: RunState, due: int) -> Group:
        """The group to lease; ones that have used up their attempts are dropped on the way."""
        if len(book.slot_deadlines()) >= (book.spec.steps - book.next_step()) * book.bound.groups_per_step:
            raise Refused(Reason.DONE)
        if not book.leasable() and book.exhausted():
            raise Refused(Reason.EXHAUSTED, f"{book.spec.prompts} prompts")
        if not admits(book.slot_deadlines(), due, book.next_step(), book.bound):
            raise Refused(Reason.BOUND, f"no room for deadline {due} at step {book.next_step()}")
        for group in book.leasable():
            if group.attempt < book.spec.max_attempts:
                return group
            book.drop(group, "attempts", group.why)
            if book.halted:
                raise Refused(Reason.HALTED, book.halted)
        if book.exhausted():
            raise Refused(Reason.EXHAUSTED, f"{book.spec.prompts} prompts")
        group = book.groups[book.issued] = Group(book.issued)
        book.issued += 1
        return group

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        book = self.book
        found = book.held(group, token)
        if found.state is not _S.LEASED:
            raise Refused(Reason.NOT_HELD, f"group {group} is {found.state}")
        book.expire_leases()
        self._readmit(book, found)
        book.transition(found, Event.EXTEND)
        found.expires_ms = self._clock() + lease_ms
        if found.expired:
            found.expired = False
            book.append("extend", group=group, token=token)

    def _readmit(self, book: RunState, group: Group) -> None:
        if group.expired and not book.room_for([group.deadline]):
            raise Refused(Reason.BOUND, f"group {group.group} had expired and its place is gone")

    async def release(self, group: int, token: str, reason: str) -> None:
        self._hand_back(group, token, Event.RELEASE, reason)

    def _hand_back(self, group: int, token: str, event: Event, why: str) -> None:
        book = self.book
        known = book.groups.get(group)
        if known is not None and known.token != token and known.previous == token:
            return
        found = book.held(group, token)
        book.transition(found, event)
        found.previous, found.why = token, why
        book.append(
            event.value, group=group, token=token, **({"reason": why} if event is Event.RELEASE else {})
        )
        book.apply_pending()

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        book = self.book
        found = book.held(group, token, forgotten=Reason.DUPLICATE)
        if found.state in (_S.SCORED, _S.TAKEN, _S.TRAINED):
            return found.taken()
        if found.state is _S.LEASED:
            book.expire_leases()
            self._readmit(book, found)
        book.transition(found, Event.ACCEPT)
        found.counts = dict(counts)
        book.append(
            "accept",
            group=group,
            token=token,
            counts=encode_counts(counts),
            **({} if reward is None else {"reward": reward}),
        )
        return found.taken()

    async def lost(self, group: int, token: str) -> None:
        self._hand_back(group, token, Event.LOST, "lost")

    async def drop(self, group: int, token: str, reason: str, wasted_tokens: int = 0) -> None:
        found = self.book.held(group, token)
        if found.state is not _S.DROPPED:
            self.book.drop(found, reason, wasted_tokens=wasted_tokens)
            self.book.apply_pending()

    # -- the trainer
    # -------------------------------------------------------------------------------------------------
    async def claim(self, epoch: str) -> LedgerStatus:
        claim(self.book, epoch)
        return self.book.status()

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        return resume(self.book, epoch, version, digest)

    async def take(self, epoch: str) -> Taken:
        return take(self.book, epoch)

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
        return commit(self.book, epoch, step, trained, digest=digest, report=report, manifest=manifest)

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        book = self.book
        book.fence(epoch)
        if version != book.version:
            raise Refused(Reason.WRONG_STATE, f"version {version} is not the committed one, {book.version}")
        if book.manifest != manifest:
            book.manifest = manifest
            book.append("publish", epoch=epoch, version=version)

    async def manifest(self) -> bytes | None:
        return self._book.manifest if self._book is not None else None

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        return (
            [record for step, record in sorted(self._book.steps.items()) if step >= first]
            if self._book
            else []
        )

    async def reports(self, first: int) -> Sequence[bytes]:
        return (
            [report for step, report in sorted(self._book.step_reports.items()) if step >= first]
            if self._book
            else []
        )

    async def checkpointed(self, version: int) -> None:
        checkpointed(self.book, version, self._registry.entries)

    # -- settings
    # ----------------------------------------------------------------------------------------------------
    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        check_bound(max_staleness, groups_per_step)
        book = self.book
        base = book.pending or book.bound
        wanted = Bound(
            base.max_staleness if max_staleness is None else max_staleness,
            base.groups_per_step if groups_per_step is None else groups_per_step,
            base.policy if policy is None else policy,
        )
        book.expire_leases()
        if wanted == book.bound:
            if book.pending is not None:
                book.pending = None
                book.append("bound", **bound_values(wanted))
            return None
        known, book.pending = wanted == book.pending, wanted
        if book.apply_pending():
            return None
        if not known:
            book.append("bound_pending", **bound_values(wanted))
        return wanted

    async def drain(self, on: bool = True) -> None:
        book = self.book
        if book.halted and not on:
            book.unhalt()
        if book.draining != on:
            book.draining = on
            book.append("drain", on=on)

    # -- the event log
    # -----------------------------------------------------------------------------------------------
    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        return [event for event in self._book.log if event["seq"] > after][:limit] if self._book else []

    async def archived(self, sequence: int) -> None:
        book = self.book
        if sequence > book.sequence:
            raise Refused(Reason.WRONG_STATE, f"event {sequence} is not written; the last is {book.sequence}")
        book.archived = max(book.archived, sequence)
        while book.log and book.log[0]["seq"] <= book.archived:
            book.log.popleft()

    async def close(self) -> None: ...
