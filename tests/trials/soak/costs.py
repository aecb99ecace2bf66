"""Measures all costs at once, and projects them to a run of many workers.

python -m tests.trials.soak.costs [--soak runs/soak.json]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from reward.config import RewardConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from services.ledger.embedded_server import EmbeddedServer
from tests.trials.soak import bus_costs
from tests.trials.soak.ledger_costs import measure_ledger
from tests.trials.soak.projection import Costs, Load, cores, saturation

SIZES = (10, 1_000, 10_000)
CONNECTIONS = (10, 200, 1_000)
WORKERS = 10_000
WORKERS_PER_REWARD = 25
LOADS = {"a group in 10 s": 0.1, "a group a second": 1.0}
VERSIONS_PER_S = 1 / 60
INGEST_GROUP = 1_500.0
"""Microseconds, where no soak is given."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured CPU, microseconds."""

    ledger: Mapping[int, Mapping[str, float]]
    """By size of the crowd, by kind of call."""
    version: Mapping[int, float]
    """Announcing a version to one engine, by connections."""
    heartbeat: Mapping[int, float]
    window: Mapping[int, float]
    message: float
    reward: float


async def measure(*, quick: bool = False) -> Measured:
    """Measure everything; takes minutes on a quiet machine, seconds if `quick`."""
    sizes, connections, count = ((10, 50), (10, 50), 50) if quick else (SIZES, CONNECTIONS, 1_000)
    with tempfile.TemporaryDirectory(prefix="tether-costs-") as directory:
        server = EmbeddedServer(Path(directory) / "ledger")
        await server.start()
        try:
            ledger = await measure_ledger(server.url, server.pid, sizes, count)
        finally:
            await server.stop()
    return Measured(
        ledger,
        {n: round(await bus_costs.version_micros(n, 5 if quick else 20), 2) for n in connections},
        {n: round(await bus_costs.heartbeat_micros(n, 1.0 if quick else 4.0), 2) for n in connections},
        {n: round(bus_costs.window_micros(n), 2) for n in sizes},
        round(await bus_costs.message_micros(count), 2),
        round(await reward_micros(50 if quick else 400), 2),
    )


async def reward_micros(count: int) -> float:
    """Measure one small rollout scored, without the verifier's own process."""
    rollout = bus_costs.small_rollout()
    async with ScorePool(RewardConfig(workers=1)) as pool:
        before = time.process_time()
        for _ in range(count):
            await score_rollout(rollout, pool, "reward")
        return (time.process_time() - before) / count * 1e6


def costs_of(measured: Measured, soak: Mapping[str, Any] | None) -> Costs:
    """Return the projection's costs: the ledger's at the largest crowd, the ingest's from the soak."""
    ledger = measured.ledger[max(measured.ledger)]
    ingest = soak["cores"]["ingest"] / soak["groups_per_s"] * 1e6 if soak else INGEST_GROUP
    half = measured.message / 2
    return Costs(
        ledger_group=sum(
            ledger[name] for name in ("lease", "accept", "take, per group", "commit, per group")
        ),
        ledger_refused=ledger["lease refused"],
        ledger_register=ledger["register"],
        ledger_look=max(ledger["endpoints"], ledger["head"]),
        ledger_applied=ledger["applied"],
        ledger_manifest=ledger["manifest"],
        ingest_group=ingest,
        ingest_applied=ledger["archive an event, client"],
        trainer_answer=measured.version[max(measured.version)] + 2 * half,
        trainer_listed=ledger["list a process, client"],
        heartbeat=measured.heartbeat[max(measured.heartbeat)],
        reward_group=measured.message + measured.reward,
    )


def projection(costs: Costs) -> dict[str, Any]:
    """Return cores by part at `WORKERS` workers, and what saturates first, for each load."""
    found = {}
    for name, rate in LOADS.items():
        load = Load(
            workers=WORKERS, rewards=WORKERS // WORKERS_PER_REWARD, groups_per_worker_s=rate,
            versions_per_s=VERSIONS_PER_S,
            refused_per_worker_s=0.5,
        )  # fmt: skip
        part, most = saturation(costs, load, WORKERS_PER_REWARD)
        shares = {part: round(share, 3) for part, share in cores(costs, load).items()}
        found[name] = {"cores": shares, "first": part, "workers": most, "groups_per_s": round(most * rate)}
    return found


def measured_costs(soak: Mapping[str, Any] | None, *, quick: bool = False) -> dict[str, Any]:
    """Measure and project; returns plain data."""
    measured = uvloop.run(measure(quick=quick))
    costs = costs_of(measured, soak)
    found = {
        "load_average": os.getloadavg(),
        "measured": asdict(measured),
        "costs": asdict(costs),
        "projection": projection(costs),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def main() -> None:
    """Measure, project, print JSON, and write it with `--out`."""
    parser = argparse.ArgumentParser(
        description="What one group, one worker and one version cost, and a projection to 10,000 workers."
    )
    parser.add_argument("--soak", type=Path, help="the JSON of a soak, for the ingest's cost")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    arguments = parser.parse_args()
    soak = json.loads(arguments.soak.read_text()) if arguments.soak else None
    text = json.dumps(measured_costs(soak, quick=arguments.quick), indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
