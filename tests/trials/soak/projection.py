"""Projects the cost of one group, one worker and one version to a run of many workers. Pure.

Legend: a cost is CPU microseconds on the one core that a part can use (the ledger's server, the ingest's and
the trainer's event loop, each reward worker's event loop). Parts that scale out have their number in the
load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured CPU, microseconds."""

    ledger_group: float
    """Server: lease, accept, extend, and the group's share of take and commit."""
    ledger_refused: float
    """Server: one lease that is refused."""
    ledger_register: float
    """Server: one heartbeat of a process."""
    ledger_look: float
    """Server: one look for endpoints, or at the head."""
    ledger_applied: float
    """Server: one engine says that it serves a version."""
    ledger_manifest: float
    """Server: one manifest read."""
    ingest_group: float
    """Ingest: receive, check, spool, accept, acknowledge, archive the events of one group."""
    ingest_applied: float
    """Ingest: archive one event of an engine."""
    trainer_answer: float
    """Trainer's event loop: announcing a version to one engine, which answers twice."""
    trainer_listed: float
    """Trainer's event loop: one registered process is read from the registry, once a step."""
    heartbeat: float
    """One heartbeat to one connection, on the side that binds."""
    reward_group: float
    """Reward worker's event loop: one group."""


@dataclass(frozen=True, slots=True)
class Load:
    """Size and rates of a run."""

    workers: int
    rewards: int
    groups_per_worker_s: float
    versions_per_s: float
    refused_per_worker_s: float
    """Leases asked for in vain: a worker that waits for room asks again and again."""
    register_s: float = 5.0 / 3
    """Seconds between two registrations of a process."""
    look_s: float = 0.5
    """Seconds between two searches for endpoints, for each of two edges."""
    head_s: float = 1.0
    heartbeat_s: float = 0.5


def cores(costs: Costs, load: Load) -> dict[str, float]:
    """Return the share of its one core that each part needs; above 1 it cannot keep up.

    `reward` is one reward worker of `load.rewards`.
    """
    processes = load.workers + load.rewards
    groups = load.groups_per_worker_s * load.workers
    versions = load.versions_per_s * load.workers
    beats = 1 / load.heartbeat_s
    needed = {
        "ledger: groups": groups * costs.ledger_group,
        "ledger: leases refused": load.workers * load.refused_per_worker_s * costs.ledger_refused,
        "ledger: registry and news": processes * costs.ledger_register / load.register_s
        + (load.workers * (2 / load.look_s + 1 / load.head_s) + load.rewards / load.look_s)
        * costs.ledger_look,
        "ledger: versions": versions * (costs.ledger_applied + costs.ledger_manifest),
        "ingest": groups * costs.ingest_group
        + versions * costs.ingest_applied
        + load.rewards * beats * costs.heartbeat,
        "trainer loop": versions * (costs.trainer_answer + costs.trainer_listed)
        + load.workers * beats * costs.heartbeat,
        "reward": groups / load.rewards * costs.reward_group + load.workers * beats * costs.heartbeat,
    }
    return {name: microseconds * MICRO for name, microseconds in needed.items()}


def parts(needed: Mapping[str, float]) -> dict[str, float]:
    """Return cores by part, the ledger's shares added up."""
    total: dict[str, float] = {}
    for name, share in needed.items():
        part = name.partition(":")[0]
        total[part] = total.get(part, 0.0) + share
    return total


def saturation(costs: Costs, load: Load, workers_per_reward: int) -> tuple[str, int]:
    """Return the part that needs its whole core first, and the most workers that it can serve.

    Workers and reward workers are added together.
    """

    def worst(workers: int) -> tuple[float, str]:
        scaled = replace(load, workers=workers, rewards=max(1, workers // workers_per_reward))
        return max((share, part) for part, share in parts(cores(costs, scaled)).items())

    most = _largest(lambda workers: worst(workers)[0] <= 1)
    return worst(most + 1)[1], most


def _largest(holds: Callable[[int], bool]) -> int:
    """Return the largest number for which `holds`, which holds for all smaller ones; at most 2**40."""
    low, high = 0, 1
    while holds(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
