"""Every reachable state of small runs, on the oracle's own code: no token over the bound, and no state
without a way out.

Versions are taken relative to the committed one, so runs of any length are covered. Groups that are alike are
interchangeable.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from protocol.errors import Reason, Refused
from protocol.lifecycle import ACTIVE, GroupState
from protocol.staleness import Policy, holds, is_published, trainable_counts
from services.ledger.interface import TakenBatch
from tests.changes import slow_unless_changed
from tests.contracts.ledger_rig import spec
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.contracts.memory_ledger.run_clock import LEAP_MS, RunClock

MOST_E = 1
"""Largest bound that a change sets."""
MOST_STATES = 500_000
LEASE_MS = 2 * LEAP_MS
DAY_MS = 86_400_000
Edge = tuple[str, MemoryLedger, int]
Publishes = Callable[[int, int, int], bool]
"""Whether the trainer publishes a version: of it, the one published before, and E of the bound in force."""


def every(number: int) -> Publishes:
    """The trainer's rule with `trainer.publish_every`."""
    return lambda version, newest, bound: is_published(version, newest, number, bound)


EACH = every(1)


def now(call: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the oracle waits for something")


def start(E: int, B: int, policy: Policy, **values: Any) -> MemoryLedger:
    ledger = MemoryLedger(clock=RunClock(lambda: 0), archive_limit=1 << 60, tokens=lambda: "t")
    now(
        ledger.create(
            spec(
                "x",
                E=E,
                B=B,
                policy=policy,
                **{"steps": 1 << 40, "max_attempts": 1 << 40, "drop_window": 1 << 40, **values},
            )
        )
    )
    now(ledger.claim("e0"))
    now(ledger.resume("e0", 0, 0))
    now(ledger.publish("e0", b"0", 0))
    for engine in "ab":
        now(ledger.applied(engine, "e0", 0))
    return ledger


def clone(ledger: MemoryLedger) -> MemoryLedger:
    """An independent copy, without what only history needs."""
    twin = copy.copy(ledger)
    run_state = ledger.run_state
    twin._run_state = dataclasses.replace(
        run_state,
        groups={n: copy.copy(group) for n, group in run_state.groups.items() if group.state in ACTIVE},
        engines=dict(run_state.engines),
        epochs=set(run_state.epochs),
        lineage=set(run_state.lineage),
        unreported_drops=[],
        reasons=type(run_state.reasons)(),
        outcomes=deque(),
        steps={},
        step_reports={},
        requests={},
        log=deque(),
    )
    return twin


def key(ledger: MemoryLedger, budget: int) -> Any:
    """What distinguishes a state from others; versions relative to the committed one, and everything that is
    too late alike."""
    run_state = ledger.run_state
    oldest = -1 - max(bound.max_staleness for bound in (run_state.bound, run_state.pending) if bound)
    oldest = min(oldest, -1 - MOST_E) if budget else oldest

    def step(version: int) -> int:
        return max(version - run_state.version, -1)

    groups = sorted(
        (
            group.state,
            step(group.deadline),
            group.expired,
            step(max(group.counts, default=-9) + group.max_staleness),
        )
        for group in run_state.groups.values()
        if group.state in ACTIVE
    )
    left = None if run_state.spec.prompts is None else run_state.spec.prompts - run_state.issued
    engines = tuple(
        sorted(
            (max(version - run_state.version, oldest), epoch in run_state.lineage)
            for epoch, version in run_state.engines.values()
        )
    )
    bounds = (run_state.bound, run_state.pending)
    return (
        tuple(groups),
        engines,
        bounds,
        run_state.running is not None,
        budget,
        left,
        run_state.resumed[0] == run_state.epoch,
        max(run_state.published - run_state.version, oldest),
    )


def moves(
    ledger: MemoryLedger, budget: int, changes: tuple[tuple[int, int], ...], publishes: Publishes
) -> Iterator[Edge]:
    """Every state that one call leads to, as (label, ledger, budget left). Groups without signal cost no
    budget: any number of them may come."""
    run_state = ledger.run_state

    def attempt(label: str, *calls: Any, left: int = budget) -> Iterator[Edge]:
        twin, refusal = clone(ledger), ""
        try:
            for call in calls:
                now(call(twin))
        except Refused as refused:
            refusal = refused.reason
        assert refusal != Reason.WRONG_STATE, label
        assert not refusal or label != "commit", refusal
        yield label, twin, left

    for engine in "ab":
        version = run_state.engines[engine][1]
        asked = {"request": f"{run_state.sequence}", "engine": engine, "holder": "w", "lease_ms": LEASE_MS}
        yield from attempt(f"lease {engine}", lambda t, a=asked: t.lease(**a))
        if (
            run_state.engines[engine] != (run_state.epoch, run_state.published)
            and run_state.resumed[0] == run_state.epoch
        ):
            yield from attempt(
                f"apply {engine}", lambda t, e=engine: t.applied(e, run_state.epoch, run_state.published)
            )
        assert version <= run_state.version
    yield from attempt("jump", lambda t: jump(t, DAY_MS), lambda t: jump(t, -2 * DAY_MS))
    yield from attempt("take", lambda t: t.take(run_state.epoch))
    if run_state.running is not None:
        yield from attempt("commit", lambda t: commit(t, run_state.running, publishes))
    elif run_state.published < run_state.version and _is_due(run_state, run_state.version, publishes):
        yield from attempt("publish", lambda t: publish(t))
    for number, group in list(run_state.groups.items()):
        if group.state is GroupState.LEASED:
            yield from attempt(
                f"accept {number}", lambda t, n=number, v=group.version: t.accept(n, "t", {v: 1})
            )
            if run_state.bound.policy is Policy.MASK and group.version < run_state.published:
                fresh = {group.version: 1, run_state.published: 1}
                yield from attempt(f"accept fresh {number}", lambda t, n=number, c=fresh: t.accept(n, "t", c))
        if group.state is GroupState.LEASED:
            yield from attempt(f"no signal {number}", lambda t, n=number: t.filter(n, "t", 1, 0.0, 0))
        if budget and group.state is GroupState.LEASED and not group.expired:
            yield from attempt(f"expire {number}", lambda t, n=number: expire(t, n), left=budget - 1)
        if budget and group.state is GroupState.SCORED:
            yield from attempt(
                f"filter {number}", lambda t, n=number: t.drop(n, "t", "filter"), left=budget - 1
            )
    if budget:
        epoch = f"e{len(run_state.epochs)}"
        yield from attempt(
            "crash",
            lambda t: t.claim(epoch),
            lambda t: t.resume(epoch, run_state.version, run_state.digest or 0),
            lambda t: publish(t),
            left=budget - 1,
        )
        for E, B in changes:
            if (run_state.bound.max_staleness, run_state.bound.groups_per_step) != (E, B):
                yield from attempt(
                    f"set {E} {B}",
                    lambda t, e=E, b=B: t.set_bound(max_staleness=e, groups_per_step=b),
                    left=budget - 1,
                )


async def expire(ledger: MemoryLedger, number: int) -> None:
    """A lease ends: by its time, or because its holder was unregistered."""
    ledger.run_state.groups[number].expired = True


async def jump(ledger: MemoryLedger, ms: int) -> None:
    """The wall clock jumps, and ends no lease; then every live holder extends its own, as it does before a
    third of it is over."""
    run_state = ledger.run_state
    live = [group.group for group in run_state.live()]
    ledger.clock = run_state.clock = RunClock(lambda: 0, run_state.clock(), wall_reading=-ms)
    run_state.expire_leases()
    assert [group.group for group in run_state.live()] == live
    for number in live:
        await ledger.extend(number, "t", LEASE_MS)


def _is_due(run_state: Any, version: int, publishes: Publishes) -> bool:
    return publishes(version, run_state.published, run_state.bound.max_staleness)


async def publish(ledger: MemoryLedger) -> None:
    """The trainer publishes the committed version."""
    run_state = ledger.run_state
    await ledger.publish(
        run_state.epoch, b"%s %d" % (run_state.epoch.encode(), run_state.version), run_state.version
    )


async def commit(ledger: MemoryLedger, taken: TakenBatch, publishes: Publishes) -> None:
    """Under wait and drop every token must be within the bound; under mask every group must have one that
    is."""
    trained = {}
    for group in taken.groups:
        trained[group.group] = trainable_counts(taken.step, group.counts, group.max_staleness)
        if ledger.run_state.bound.policy is Policy.MASK:
            assert trained[group.group], f"group {group.group} has no fresh token"
        else:
            assert trained[group.group] == dict(group.counts), (
                f"group {group.group} has tokens over the bound"
            )
    epoch, version = ledger.run_state.epoch, taken.step + 1
    manifest = b"%d" % version if _is_due(ledger.run_state, version, publishes) else b""
    await ledger.commit(epoch, taken.step, trained, digest=0, report=b"", manifest=manifest)


def search(
    ledger: MemoryLedger,
    budget: int,
    changes: tuple[tuple[int, int], ...] = (),
    publishes: Publishes = EACH,
) -> int:
    """Visit every state; return how many. Fails on a violation, and on a state from which no commit can be
    reached."""
    first = key(ledger, budget)
    parents: dict[Any, Any] = {first: None}
    before: dict[Any, list[Any]] = {}
    committing: set[Any] = set()
    queue = deque([(first, ledger, budget)])
    while queue:
        state, here, left = queue.popleft()
        for label, there, after in moves(here, left, changes, publishes):
            run_state = there.run_state
            if run_state.bound.policy is not Policy.MASK:
                assert holds(run_state.slot_deadlines(), run_state.next_step(), run_state.bound), trace(
                    parents, state, label
                )
            found = key(there, after)
            assert label != "jump" or found == state, trace(parents, state, label)
            before.setdefault(found, []).append(state)
            if label == "commit":
                committing.add(state)
            if found not in parents:
                parents[found] = (state, label)
                queue.append((found, there, after))
                assert len(parents) < MOST_STATES
        done = here.run_state.exhausted() and not any(
            group.state in ACTIVE for group in here.run_state.groups.values()
        )
        if done:
            committing.add(state)
    alive, queue2 = set(committing), deque(committing)
    while queue2:
        for state in before.get(queue2.popleft(), ()):
            if state not in alive:
                alive.add(state)
                queue2.append(state)
    stuck = [state for state in parents if state not in alive]
    assert not stuck, trace(parents, min(stuck, key=lambda state: len(trace(parents, state))))
    return len(parents)


def trace(parents: dict[Any, Any], state: Any, *last: str) -> list[str]:
    labels = list(last)
    while parents[state] is not None:
        state, label = parents[state]
        labels.insert(0, label)
    return labels


STRICT = (Policy.WAIT, Policy.DROP)
MASK = Policy.MASK
CHANGES = ((0, 1), (0, 2), (1, 1), (0, 3))
SMALL = [(0, 1), (0, 2), (1, 1)]
DEAR = ((0, 2, Policy.WAIT), (1, 1, Policy.DROP))
slow = (pytest.mark.slow, pytest.mark.timeout(3600))
changed = slow_unless_changed(
    "protocol/staleness", "protocol/lifecycle", "services/ledger/", "tests/contracts/memory_ledger/",
    "tests/services/ledger/test_states",
)  # fmt: skip


def cases(
    strict: list[tuple[int, int]],
    mask: list[tuple[int, int]],
    late: list[tuple[int, int, Policy]],
    dear: tuple[tuple[int, int, Policy], ...] = (),
) -> list[Any]:
    """(E, B, policy): the first under wait and drop, the others under mask, which has many more states;
    `late` ones are slow, and `dear` ones where no rule has changed."""
    quick = [(E, B, policy) for policy in STRICT for E, B in strict] + [(E, B, Policy.MASK) for E, B in mask]
    return [
        *(pytest.param(*case, marks=changed) if case in dear else case for case in quick),
        *(pytest.param(*case, marks=slow) for case in late),
    ]


@pytest.mark.parametrize(
    ("E", "B", "policy"),
    cases(
        [*SMALL, (2, 1), (1, 2), (1, 3)],
        SMALL,
        [(2, 1, MASK), (1, 2, MASK), (2, 2, Policy.WAIT), (2, 2, Policy.DROP)],
    ),
)
def test_undisturbed_runs_keep_the_bound_and_never_stick(E: int, B: int, policy: Policy) -> None:
    assert search(start(E, B, policy), 0) > 5


@pytest.mark.parametrize(
    ("E", "B", "policy"), cases([*SMALL, (2, 1)], SMALL, [(2, 1, MASK)], ((2, 1, Policy.WAIT),))
)
def test_expiries_filters_and_crashes_neither_break_the_bound_nor_stick(
    E: int, B: int, policy: Policy
) -> None:
    assert search(start(E, B, policy), 2) > 20


@pytest.mark.parametrize(("E", "B", "policy"), cases(SMALL, [], [(E, B, MASK) for E, B in SMALL], DEAR))
def test_changes_of_the_bound_neither_break_it_nor_stick(E: int, B: int, policy: Policy) -> None:
    assert search(start(E, B, policy), 2, CHANGES) > 20


def test_a_change_of_the_bound_under_mask_does_not_stick() -> None:
    assert search(start(0, 2, Policy.MASK), 1, ((0, 1),)) > 20


@pytest.mark.parametrize("policy", STRICT)
def test_runs_with_an_end_finish(policy: Policy) -> None:
    assert search(start(1, 2, policy, prompts=3), 1, ((1, 1),)) > 20


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("number", "E", "B"), [(2, 1, 1), (3, 2, 1), (0, 1, 1)])
def test_versions_that_are_not_published_neither_break_the_bound_nor_stick(
    number: int, E: int, B: int, policy: Policy
) -> None:
    budget = 0 if policy is Policy.MASK and E > 1 else 2
    assert search(start(E, B, policy), budget, publishes=every(number)) > 10


@pytest.mark.parametrize(
    ("number", "policy"),
    [
        (2, Policy.WAIT),
        pytest.param(2, Policy.DROP, marks=changed),
        pytest.param(0, Policy.WAIT, marks=changed),
    ],
)
def test_a_lower_bound_does_not_stick_while_versions_are_not_published(number: int, policy: Policy) -> None:
    assert search(start(1, 1, policy), 2, CHANGES, every(number)) > 20


@pytest.mark.parametrize(("number", "E"), [(2, 0), (3, 1)])
def test_search_finds_that_a_rule_without_the_bound_would_stick(number: int, E: int) -> None:
    """With E < number - 1 no lease of the published version could be trained in the last step before the
    next."""
    with pytest.raises(AssertionError, match="commit"):
        search(start(E, 1, Policy.WAIT), 0, publishes=lambda version, newest, _: version - newest >= number)
