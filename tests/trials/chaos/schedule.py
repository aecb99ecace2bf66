"""Draws which faults a run gets, and when: a pure function of the seed.

Every kind of fault hits every target once before any does so again; order, moments and durations are drawn.
The faults overlap: the next one begins about `PAUSE_S` after the last, whatever is still active.
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

PAUSE_S = (0.5, 4.5)
"""Shortest and longest time between the beginnings of two faults."""
SERVICES = ("rollout.0", "rollout.1", "reward.0", "reward.1", "ingest", "trainer", "monitor")
LINKS = ("ledger", "rollouts", "scored", "weights", "calls")
BUS_LINKS = LINKS[1:]
KINDS: dict[str, tuple[tuple[str, ...], tuple[float, float]]] = {
    "kill": ((*SERVICES, "scorer", "redis", "up"), (0.1, 2.0)),
    "stop": (("rollout.0", "reward.0", "ingest", "trainer", "redis", "up"), (0.5, 6.0)),
    "restart": (("rollout.1", "reward.1", "ingest", "trainer", "monitor", "redis"), (0.1, 2.0)),
    "cut": (LINKS, (0.5, 5.0)),
    "stall": (LINKS, (0.5, 5.0)),
    "mute": (LINKS, (0.5, 5.0)),
    "slow": (LINKS, (1.0, 5.0)),
    "corrupt": (BUS_LINKS, (1.0, 5.0)),
    "truncate": (LINKS, (0.5, 3.0)),
    "fill": (("run", "redis", "shm"), (1.0, 5.0)),
    "skew": (("rollout.0", "reward.0", "ingest", "trainer", "redis"), (2.0, 8.0)),
}
"""Kind -> targets, and the shortest and longest time in seconds until it is repaired."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at_s: float
    """Seconds since the first one could have come."""
    kind: str
    target: str
    lasts_s: float
    """Seconds until it is repaired, or until what was killed may be started again."""


def schedule(seed: int, minutes: float, kinds: Collection[str] = tuple(KINDS)) -> list[Fault]:
    """Return the faults of a run, in order. All of them end within `minutes`.

    Kinds that a machine does not permit are left out by `kinds`; the others then come at the same moments,
    for as long, as with them.
    """
    rng = random.Random(seed)
    end_s, at_s = minutes * 60, 0.0
    faults = []
    for kind, target in _cards(rng):
        at_s += rng.uniform(*PAUSE_S)
        lasts_s = rng.uniform(*KINDS[kind][1])
        if at_s + KINDS[kind][1][1] > end_s:
            return [fault for fault in faults if fault.kind in kinds]
        faults.append(Fault(round(at_s, 2), kind, target, round(lasts_s, 2)))
    raise AssertionError("the cards never run out")


def _cards(rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        deck = [(kind, target) for kind, (targets, _) in KINDS.items() for target in targets]
        rng.shuffle(deck)
        yield from deck
