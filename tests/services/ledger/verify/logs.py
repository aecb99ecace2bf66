"""The event log of a rough run, to be spoilt by tests."""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from protocol.staleness import Policy
from services.ledger.event_log.events import decode_fields
from services.ledger.verify.verifier import AuditResult, Verifier
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.watched import Watched
from tests.trials.simulation.world import World

Event = dict[str, Any]
Log = list[Event]
ROUGH = Scenario(
    groups=60,
    seed=4,
    max_staleness=1,
    groups_per_step=3,
    policy=Policy.MASK,
    engines=3,
    slots=3,
    poll_ms=20_000,
    life_ms=400_000,
    hang_share=0.05,
    fail_share=0.05,
    filter_share=0.03,
    lost_share=0.03,
    crash_share=0.2,
    change_share=0.15,
    policy_changes=True,
)


class Kept(Watched):
    """Keeps the events that it verifies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: Log = []

    async def drain(self) -> Log:
        events = await super().drain()
        self.log += events
        return events


@cache
def _logged(scenario: Scenario) -> list[str]:
    world = World(scenario)
    world.ledger = kept = Kept(lambda: world.now, random.Random(scenario.seed + 1), scenario.repeat_share)
    asyncio.run(world.run())
    return [json.dumps(event) for event in kept.log]


def rough_log() -> Log:
    """About 400 events: leases that expired, releases, drops, crashes, a rewind, changes of the bound. The
    caller may change them."""
    return [json.loads(line) for line in _logged(ROUGH)]


def find(log: Log, kind: str, n: int = -1, **fields: Any) -> Event:
    """The n-th event of a kind that has these values."""
    return [
        event
        for event in log
        if event["event"] == kind and all(event.get(key) == value for key, value in fields.items())
    ][n]


def renumbered(log: Log) -> Log:
    """Close the numbers up, as a careful forger would."""
    for seq, event in enumerate(log, 1):
        event["seq"] = seq
    return log


def verify_events(events: Iterable[Mapping[str, Any]]) -> AuditResult:
    """Check events in order, as `Ledger.events` lists them."""
    verifier = Verifier()
    for event in events:
        verifier.apply(decode_fields(event))
    return verifier.result()
