"""Simulates agents in virtual time: sessions of heavy-tailed numbers of calls, with tools that sleep between
them, which live over many versions.

Every decision is that of the ledger in memory, and its log is verified. A group is what its sessions are:
sampled when the model answers, silent while a tool runs, and scored when the last of them has ended.
"""

import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from protocol.errors import Refused
from protocol.staleness import Policy, lag
from services.ledger.interface import Lease, TakenBatch
from tests.trials.simulation.engines import Engine, Fleet
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.world import World

LEAST = 2
"""Sessions that must remain of a group of which others have failed."""


@dataclass(frozen=True, slots=True)
class SessionScenario(Scenario):
    """Sizes and times of agents, in virtual milliseconds; what is not here is as in `Scenario`."""

    samples: int = 8
    """Sessions of a group."""
    engines: int = 8
    slots: int = 16
    """Groups: engines x slots x samples sessions are open at once, as far as the bound has room."""
    slow_engines: int = 0
    groups_per_step: int = 32
    step_ms: float = 60_000
    calls: float = 6.0
    """Median calls of a session: log-normal."""
    calls_sigma: float = 1.0
    most_calls: int = 256
    call_tokens: float = 200.0
    """Median tokens of a call: log-normal with sigma 0.8."""
    most_call_tokens: int = 4096
    token_ms: int = 20
    tool_ms: float = 2000.0
    """Shortest time between two calls: Pareto with exponent `tail`."""
    tail: float = 1.3
    longest_tool_ms: float = 1_800_000
    episode_ms: float = 3_600_000
    """Sessions that take longer fail."""
    life_ms: float = 12 * 3_600_000
    filter_share: float = 0.0
    change_share: float = 0.0
    rewind_share: float = 0.0


@dataclass(slots=True)
class Session:
    """One session of a group: when it samples, and what became of it."""

    calls: list[tuple[float, float]]
    """Begin and end of each, ms after the lease."""
    tokens: int
    failed: bool
    """Whether it takes longer than an episode may."""
    counts: Counter[int] = field(default_factory=Counter)
    """Sampled tokens by version, once its group is complete."""
    trained: int = 0
    """Tokens that carried gradient."""
    outcome: str = ""
    """trained, masked (some of its tokens), all masked, or why it has none: a drop reason, or episode_s."""

    @property
    def length_ms(self) -> float:
        """How long it takes, at most as long as an episode may."""
        return self.calls[-1][1]


def draw_sessions(scenario: SessionScenario, group: int) -> list[Session]:
    """Return the sessions of a group: the same for each policy, bound and attempt."""
    draw = random.Random(f"{scenario.seed} {group}")
    return [_draw(scenario, draw) for _ in range(scenario.samples)]


def _draw(s: SessionScenario, draw: random.Random) -> Session:
    number = min(s.most_calls, max(1, round(draw.lognormvariate(math.log(s.calls), s.calls_sigma))))
    now, tokens, calls = 0.0, 0, []
    for call in range(number):
        if call:
            now += min(s.tool_ms * draw.paretovariate(s.tail), s.longest_tool_ms)
        said = min(s.most_call_tokens, max(1, round(draw.lognormvariate(math.log(s.call_tokens), 0.8))))
        end = now + said * s.token_ms
        if end > s.episode_ms:
            return Session([*calls, (now, s.episode_ms)] if now < s.episode_ms else calls, tokens, True)
        calls.append((now, end))
        now, tokens = end, tokens + said
    return Session(calls, tokens, False)


class SessionFleet(Fleet):
    """Engines whose groups are sessions."""

    scenario: SessionScenario
    sessions: dict[int, list[Session]]
    """Group -> its sessions."""
    running: dict[int, tuple[Engine, list[bool]]]
    """Group -> where its last lease is, and whether that is over."""

    async def end(self, group: int) -> None:
        """End the sessions of a group that a take has dropped, as the trainer's message does."""
        engine, over = self.running.get(group, (None, [True]))
        if engine is not None and not over[0]:
            over[0] = True
            engine.free += 1
            self.counts["ended"] += 1
            await self.fill(engine)

    def _generate(self, engine: Engine, lease: Lease) -> None:
        s, began, life, group = self.scenario, self._now(), engine.life, lease.group
        found = self.sessions[group] = draw_sessions(s, group)
        over = [False]
        self.running[group] = engine, over

        def is_over() -> bool:
            return over[0] or engine.life != life or not engine.alive

        async def extend() -> None:
            if is_over():
                return
            try:
                await self.ledger.call("extend", group, lease.token, s.lease_ms)
            except Refused:
                await self.end(group)
                return
            self._schedule(s.lease_ms / 3, extend)

        async def done() -> None:
            if is_over():
                return
            engine.free += 1
            remain = [session for session in found if not session.failed]
            if len(remain) < min(LEAST, s.samples):
                over[0] = True
                with suppress(Refused):  # the lease is another's by now
                    await self.ledger.call("drop", group, lease.token, "episode")
                    self.give_up(group, "episode")
            else:
                for session in remain:
                    session.counts = self._sampled(engine, session, began)
                counts = sum((session.counts for session in remain), Counter())
                self._schedule(
                    self.random.expovariate(1 / s.score_ms), lambda: self._scored(lease, dict(counts), over)
                )
            await self.fill(engine)

        self._schedule(s.lease_ms / 3, extend)
        self._schedule(max(session.length_ms for session in found), done)

    def give_up(self, group: int, reason: str) -> None:
        """Note why the sessions of a group are not trained; those that had failed keep their own reason."""
        for session in self.sessions[group]:
            session.outcome = "episode_s" if session.failed else reason

    def _sampled(self, engine: Engine, session: Session, began: int) -> Counter[int]:
        """Return the tokens of a session by version: each is of the one served when it was sampled."""
        changes = [at - began for at, _ in engine.served] + [math.inf]
        counts: Counter[int] = Counter()
        for begin, end in session.calls:
            for (_, version), since, until in zip(engine.served, changes, changes[1:], strict=False):
                overlap = min(end, until) - max(begin, since)
                if overlap > 0:
                    counts[version] += round(overlap / self.scenario.token_ms)
        return +counts


class SessionWorld(World):
    """A run of agents."""

    scenario: SessionScenario
    fleet: SessionFleet

    def __init__(self, scenario: SessionScenario) -> None:
        super().__init__(scenario)
        self.waited: Counter[int] = Counter()
        """Steps between the one that could have trained a group first, when it was accepted, and the one
        that did -> groups."""
        self._accepted: dict[int, int] = {}

    def make_fleet(self) -> SessionFleet:
        fleet = SessionFleet(self.scenario, self.ledger, self.random, lambda: self.now, self.schedule)
        fleet.sessions, fleet.running = {}, {}
        return fleet

    async def _on_scored(self, group: int, token: str) -> None:
        self._accepted[group] = self.ledger.memory.run_state.next_step()
        await super()._on_scored(group, token)

    async def take(self) -> None:
        """Begin the next step, and end the sessions of the groups that were dropped for it."""
        before = self.running
        await super().take()
        if self.running is not None and self.running is not before:
            reason = "stale" if self.scenario.policy is Policy.MASK else "straggler"
            for group in self.running.dropped:
                self.fleet.give_up(group, reason)
                await self.fleet.end(group)

    async def commit(self, epoch: str, taken: TakenBatch) -> None:
        """Commit a step, and note what each of its sessions contributed."""
        for group in taken.groups:
            self.waited[taken.step - self._accepted[group.group]] += 1
            for session in self.fleet.sessions[group.group]:
                oldest = taken.step - group.max_staleness
                session.trained = sum(n for version, n in session.counts.items() if version >= oldest)
                session.outcome = _outcome(session)
                assert all(lag(taken.step, v) <= group.max_staleness for v in session.counts if v >= oldest)
        await super().commit(epoch, taken)


def _outcome(session: Session) -> str:
    if session.failed:
        return "episode_s"
    sampled = session.counts.total()
    return "trained" if session.trained == sampled else "masked" if session.trained else "all masked"
