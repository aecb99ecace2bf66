"""Watches a ledger under simulation: repeats calls, verifies each event, compares two ledgers."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from protocol.errors import Refused
from services.ledger.event_log.events import ExpireEvent, decode_fields
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import AuditResult, Verifier
from tests.contracts.ledger_rig import padded
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.contracts.memory_ledger.run_state import WAITS_MS
from tests.trials.simulation.pipeline import Pipeline

DAY_MS = 86_400_000
FAR_MS = 10**14
"""Later than any reading of a clock."""
DRAIN_CALLS = 500
Event = dict[str, Any]


class Watched:
    """The oracle in memory, on a virtual clock."""

    def __init__(self, clock: Callable[[], int], random_: random.Random, repeat_share: float) -> None:
        self.memory = MemoryLedger(clock=clock, tokens=self._token)
        self.calls: Counter[str] = Counter()
        self.repeated = 0
        self.refused: Counter[str] = Counter()
        self.violations = 0
        self._random = random_
        self._repeat_share = repeat_share
        self._verifier = Verifier()
        self._drained = 0
        self._turn = 0

    def _token(self) -> str:
        return f"t{self._turn}"

    async def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the ledger, now and then twice: the second answer must equal the first.

        Raises Refused as the ledger does.
        """
        self._turn += 1
        self.calls[name] += 1
        if self._turn % DRAIN_CALLS == 0:
            await self.drain()
        answer = await self.once(name, arguments, named)
        if isinstance(answer, Refused):
            self.refused[answer.reason] += 1
            raise answer
        if self._random.random() < self._repeat_share:
            self._turn += 1
            self.repeated += 1
            again = await self.once(name, arguments, named)
            assert again == answer, f"{name}{arguments} answered {answer}, and {again} when it was repeated"
        return answer

    async def once(self, name: str, arguments: Any, named: Any) -> Any:
        """Return the answer or refusal of one call."""
        return await outcome(getattr(self.memory, name), arguments, named)

    def _wait(self) -> None:
        state, key = self.memory.run_state, self._server.keys.of("waits")
        for engine, (groups, at) in state.waits.items():
            if state.clock() - at > WAITS_MS:
                self._pipeline.later("HDEL", key, engine)
            else:
                self._pipeline.later("HSET", key, engine, f"{groups} {FAR_MS}")

    async def drain(self) -> list[Event]:
        """Verify the new events, and let the ledger forget them."""
        events = [dict(event) for event in await self.memory.events(self._drained, 1_000_000)]
        for event in events:
            self._verifier.apply(decode_fields(event))
        self._drained += len(events)
        await self.memory.archived(self._drained)
        return events

    async def result(self) -> AuditResult:
        """Return what the log proves, once the run is over."""
        await self.drain()
        return self._verifier.result()

    async def close(self) -> None: ...


class Twins(Watched):
    """The oracle and the ledger on a server, which must decide alike in every call.

    The oracle's clock rules: a lease that expires in a call is moved into the past on the server before the
    same call is made there, and an engine waits for room there as long as here.
    """

    def __init__(
        self, clock: Callable[[], int], random_: random.Random, repeat_share: float, url: str, run: str
    ) -> None:
        super().__init__(clock, random_, repeat_share)
        self._pipeline = Pipeline(url)
        self._server = RedisLedger(self._pipeline, run, tokens=self._token)  # type: ignore[arg-type]

    async def once(self, name: str, arguments: Any, named: Any) -> Any:
        before = self.memory.run_state.sequence if name != "create" else 0
        if name == "lease":
            self._wait()
        expected = await super().once(name, arguments, named)
        new, log = self.memory.run_state.sequence - before, self.memory.run_state.log
        fresh = [log[i] for i in range(len(log) - new, len(log))]
        self._expire([event.group for event in fresh if isinstance(event, ExpireEvent)])
        if name == "lease":
            named = {**named, "lease_ms": DAY_MS}
        elif name == "extend":
            arguments = (*arguments[:2], DAY_MS)
        label = f"call {self._turn}, {name}{arguments}{named}"
        self._pipeline.begin(label, getattr(self._server, name)(*arguments, **named), expected)
        return expected

    def _expire(self, groups: list[int]) -> None:
        for order, group in enumerate(groups):
            self._pipeline.later("ZADD", self._server.keys.of("leases"), "XX", order, padded(group))

    async def drain(self) -> list[Event]:
        self._pipeline.flush()
        found = await self._server.events(self._drained, 1_000_000)
        events = await super().drain()
        assert [plain(event) for event in found] == [plain(event) for event in events]
        self._pipeline.begin("status", self._server.status(), await self.memory.status())
        self._pipeline.begin("archived", self._server.archived(self._drained), None)
        return events

    async def close(self) -> None:
        await self._server.close()


async def outcome(method: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """Return what a call returns, or its refusal."""
    try:
        return await method(*arguments, **named)
    except Refused as refusal:
        return refusal


def plain(event: Any) -> Event:
    """Return an event without its time, which each ledger takes from its own clock."""
    return {key: value for key, value in event.items() if key != "time_ms"}
