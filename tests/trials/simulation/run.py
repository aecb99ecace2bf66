"""Simulates a run and prints one line of JSON.

python -m tests.trials.simulation.run --groups 100000 --ledger redis --policy wait --seed 1
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import redis

from protocol.staleness import Policy
from services.ledger.embedded_server import EmbeddedServer, find_server
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.world import Outcome, World


def facts(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """Return the line that is printed."""
    trained = outcome.lags.total()
    return {
        "groups": scenario.groups, "seed": scenario.seed, "E": scenario.max_staleness,
        "B": scenario.groups_per_step,
        "policy": scenario.policy.value, "steps": outcome.audit.steps, "trained": outcome.audit.trained,
        "dropped": outcome.dropped, "no_signal": outcome.dropped.get("no_signal", 0),
        "trained_tokens": trained, "masked_tokens": outcome.counts["masked_tokens"],
        "lag_mean": round(sum(n * lag for lag, n in outcome.lags.items()) / max(trained, 1), 3),
        "lag_max": outcome.audit.max_lag,
        "bound_max": outcome.audit.bound,
        **{key: outcome.counts[key] for key in ("deaths", "crashes", "rewinds", "changes", "late")},
        "calls": outcome.calls.total(), "refused": outcome.refused.total(),
        "virtual_h": round(outcome.virtual_h, 1),
        "wall_s": round(outcome.wall_s, 1), "violations": len(outcome.audit.violations),
    }  # fmt: skip


async def simulate(scenario: Scenario, url: str | None = None, run: str = "simulated") -> Outcome:
    """Run a scenario on the oracle, and on the server at `url` beside it."""
    world = World(scenario)
    if url is not None:
        world.beside(url, run)
    try:
        return await world.run()
    finally:
        await world.ledger.close()


def main() -> int:
    """Simulate; the exit code is 1 if there is any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument(
        "--ledger",
        choices=["memory", "redis"],
        default="memory",
        help="redis: the same decisions on a server too",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=Policy, default=Policy.MASK)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument(
        "--policy-changes", action="store_true", help="change the policy too, not only E and B"
    )
    parser.add_argument(
        "--no-signal-share", type=float, default=0.0, help="groups that are filtered for equal rewards"
    )
    parser.add_argument("--publish-every", type=int, default=1, help="versions from one that engines get")
    parser.add_argument("--samples", type=int, default=1, help="samples of a group")
    parser.add_argument("--keep-first", type=int, default=0, help="samples after which it is complete")
    parser.add_argument("--server", default="", help="binary of the server; empty: the embedded one")
    arguments = vars(parser.parse_args())
    ledger, server = arguments.pop("ledger"), arguments.pop("server")
    scenario = Scenario(**arguments)
    if ledger == "memory":
        outcome = asyncio.run(simulate(scenario))
    else:
        with tempfile.TemporaryDirectory() as directory:
            outcome = asyncio.run(_on_server(scenario, Path(directory), server or find_server()))
    print(json.dumps({"ledger": ledger, **facts(scenario, outcome)}), flush=True)
    for violation in outcome.audit.violations[:20]:
        print(violation, file=sys.stderr)
    return 1 if outcome.audit.violations else 0


async def _on_server(scenario: Scenario, directory: Path, binary: str) -> Outcome:
    server = EmbeddedServer(directory, binary)
    await server.start()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "no")  # nothing is killed here
    try:
        return await simulate(scenario, server.url)
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
