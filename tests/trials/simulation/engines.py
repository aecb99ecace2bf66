"""Simulates engines that lease, generate for heavy-tailed times while weights arrive, die and restart."""

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protocol.errors import Reason, Refused
from services.ledger.interface import Lease
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.watched import Watched

Action = Callable[[], Awaitable[None]]
Schedule = Callable[[float, Action], None]


@dataclass(slots=True)
class Engine:
    """One engine process; `life` counts its incarnations."""

    number: int
    slowness: float
    life: int = 0
    alive: bool = True
    free: int = 0
    """Slots that generate nothing."""
    served: list[tuple[int, int]] = field(default_factory=list)
    """(time, version) of every update that this incarnation applied."""

    @property
    def name(self) -> str:
        return f"engine{self.number}.{self.life}"


class Fleet:
    """All engines of a run. `on_scored` is called for every group that was accepted."""

    def __init__(
        self,
        scenario: Scenario,
        ledger: Watched,
        random_: random.Random,
        now: Callable[[], int],
        schedule: Schedule,
    ) -> None:
        self.scenario, self.ledger, self.random = scenario, ledger, random_
        self._now, self._schedule = now, schedule
        self.engines = [
            Engine(n, scenario.slowness if n < scenario.slow_engines else 1.0, free=scenario.slots)
            for n in range(scenario.engines)
        ]
        self.epoch, self.version = "", 0
        self.counts: Counter[str] = Counter()
        self.on_scored: Callable[[int, str], Awaitable[None]]

    async def announce(self, epoch: str, version: int) -> None:
        """Publish weights: every engine applies them after a delay of its own."""
        self.epoch, self.version = epoch, version
        for engine in self.engines:
            if engine.alive:
                self._later_apply(engine)

    def start(self) -> None:
        for engine in self.engines:
            self._die_later(engine)
            self._poll_later(engine)

    def _later_apply(self, engine: Engine) -> None:
        life, delay = (
            engine.life,
            self.scenario.apply_ms * engine.slowness * self.random.lognormvariate(0, 0.7),
        )

        async def apply() -> None:
            if engine.alive and engine.life == life:
                await self.apply(engine)

        self._schedule(delay, apply)

    async def apply(self, engine: Engine) -> None:
        """Make the newest version live; slots that were refused try again."""
        epoch, version = self.epoch, self.version
        await self.ledger.call("applied", engine.name, epoch, version)
        if not engine.served or engine.served[-1][1] != version:
            engine.served.append((self._now(), version))
        await self.fill(engine)

    async def fill(self, engine: Engine) -> None:
        """Lease groups for the free slots, as far as the ledger grants them."""
        while engine.alive and engine.free:
            try:
                lease = await self.ledger.call(
                    "lease", request=f"{engine.name}-{self.ledger.calls['lease']}", engine=engine.name,
                    holder=engine.name,
                    lease_ms=self.scenario.lease_ms, groups=self.scenario.slots - engine.free,
                )  # fmt: skip
            except Refused as refusal:
                if refusal.reason is Reason.HALTED:
                    raise
                return
            engine.free -= 1
            self._generate(engine, lease)

    def _poll_later(self, engine: Engine) -> None:
        async def poll() -> None:
            await self.fill(engine)
            self._poll_later(engine)

        self._schedule(self.scenario.poll_ms * (0.5 + self.random.random()), poll)

    def _generate(self, engine: Engine, lease: Lease) -> None:
        s, began, life = self.scenario, self._now(), engine.life
        draws = sorted(self.random.paretovariate(s.tail) for _ in range(s.samples))
        slowest = draws[(s.keep_first or s.samples) - 1]
        duration = s.generate_ms * engine.slowness * min(slowest, s.longest)
        score = self.random.expovariate(1 / s.score_ms)
        stops = began + self.random.random() * duration if self.random.random() < s.hang_share else math.inf
        over = [False]

        async def extend() -> None:
            if over[0] or engine.life != life or not engine.alive or self._now() > stops:
                return
            try:
                await self.ledger.call("extend", lease.group, lease.token, s.lease_ms)
            except Refused:
                over[0] = True  # dropped, or taken over: the generation is aborted
                engine.free += 1
                await self.fill(engine)
                return
            self._schedule(s.lease_ms / 3, extend)

        async def generated() -> None:
            if over[0] or engine.life != life or not engine.alive:
                return
            engine.free += 1
            counts = self._tokens(engine, began, self._now())
            self._schedule(score, lambda: self._scored(lease, counts, over))
            await self.fill(engine)

        self._schedule(s.lease_ms / 3, extend)
        self._schedule(duration, generated)

    def _tokens(self, engine: Engine, began: int, end: int) -> dict[int, int]:
        """Return tokens per version, in proportion to the time for which the engine served each."""
        counts: dict[int, int] = {}
        for since, version in reversed(engine.served):
            span = end - max(since, began)
            counts[version] = counts.get(version, 0) + max(span // self.scenario.token_ms, 0)
            end = min(end, since)
            if since <= began:
                break
        counts = {version: n for version, n in counts.items() if n}
        return counts or {engine.served[-1][1]: 1}

    async def _scored(self, lease: Lease, counts: dict[int, int], over: list[bool]) -> None:
        """Have the ingest accept a scored group, or let it fail."""
        if over[0]:
            return
        over[0] = True
        s, group, token = self.scenario, lease.group, lease.token
        kind = self.random.random()
        try:
            if kind < s.fail_share:
                self.counts["failed"] += 1
                return await self.ledger.call("release", group, token, "score")
            if kind > 1 - s.no_signal_share:
                return await self.ledger.call("filter", group, token, sum(counts.values()), 1.0, 0)
            await self.ledger.call("accept", group, token, counts)
            kind -= s.fail_share
            if kind < s.filter_share:
                return await self.ledger.call("drop", group, token, "filter")
            if kind < s.filter_share + s.lost_share:
                self.counts["lost"] += 1
                return await self.ledger.call("lost", group, token)
        except Refused:
            self.counts["late"] += 1
            return
        await self.on_scored(group, token)

    def _die_later(self, engine: Engine) -> None:
        async def die() -> None:
            self.counts["deaths"] += 1
            engine.alive = False
            self._schedule(self.random.expovariate(1 / self.scenario.down_ms), rejoin)

        async def rejoin() -> None:
            engine.life += 1
            engine.alive, engine.free, engine.served = True, self.scenario.slots, []
            self._die_later(engine)
            await self.apply(engine)

        self._schedule(self.random.expovariate(1 / self.scenario.life_ms), die)
