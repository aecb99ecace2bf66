"""Runs the loop with a trainer on two hosts, network namespaces on a bridge, and loses each of them in turn.

    python -m tests.trials.chaos.trainer_hosts

    first    10.99.0.2   Redis, ingest, reward, host 0 of the trainer
    second   10.99.0.3   host 1 of the trainer
    engines  10.99.0.4   a rollout worker

Redis, bus, weights and torch's rendezvous go over the network. Exit codes are as in
`tests.trials.chaos.hosts`.
"""

import asyncio
import contextlib
import sys

import psutil

from services.bus.curve import create_keys
from services.ledger.redis.ledger import RedisLedger
from tests.integration.loop import ROOT
from tests.trials.chaos.checks import check_run, living_children
from tests.trials.chaos.hosts import Hosts, connected, cut, main, reached
from tests.trials.chaos.place import Place
from tests.trials.chaos.run import tell_last_step
from tests.trials.chaos.scene import adopt_orphans

HOSTS = {"first": "10.99.0.2", "second": "10.99.0.3", "engines": "10.99.0.4"}
TRAINER = ("first", "second")
PEER_TIMEOUT_S = 5.0
VARIABLES = {
    "TETHER_TRAINER__BACKEND": "megatron",
    "TETHER_PARALLEL__DATA_PARALLEL_SIZE": "2",
    "TETHER_NODES": "2",
    "TETHER_RENDEZVOUS": f"{HOSTS['first']}:29400",
    "TETHER_CLUSTER__PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
}
CUT_S = 3 * PEER_TIMEOUT_S
"""Long enough for both sides of a cut to notice it."""


async def start_trainer(hosts: Hosts, host: str) -> None:
    """Start the trainer's service of a host, and start it again whenever it fails."""
    keep = str(ROOT / "deploy/slurm/keep_running.sh")
    number = f"TETHER_NODE_RANK={TRAINER.index(host)}"
    await hosts.start(host, "trainer", "env", number, "bash", keep, sys.executable, "-m", "services.trainer")


def kill_trainer(hosts: Hosts, host: str) -> None:
    """SIGKILL to the trainer's service of a host and its ranks; what starts it again stays."""
    for child in psutil.Process(hosts.processes[host, "trainer"].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "services.trainer" in child.cmdline() and "bash" not in child.cmdline():
                child.kill()


async def more_steps(ledger: RedisLedger, said: str) -> None:
    """Wait until some steps more are made."""
    await reached(ledger, (await ledger.status()).version + 3)
    print(said, flush=True)


async def run(place: Place) -> list[str]:
    """Run the whole scenario; returns violations."""
    adopt_orphans()
    create_keys(place.root / "keys")
    hosts = Hosts(place, HOSTS, VARIABLES)
    await hosts.redis()
    ledger = await connected(hosts.url)
    if await (await hosts.service("first", "prepare")).wait() != 0:
        return ["prepare failed"]
    for host, name in (("first", "ingest"), ("first", "reward"), ("engines", "rollout")):
        await hosts.service(host, name)
    for host in TRAINER:
        await start_trainer(hosts, host)
    await reached(ledger, 2)
    print("both hosts of the trainer work", flush=True)
    for host in reversed(TRAINER):
        kill_trainer(hosts, host)
        await more_steps(ledger, f"the trainer on {host} was killed and has come back")
    async with cut("second"):
        await asyncio.sleep(CUT_S)
    await more_steps(ledger, "second was cut off and has come back")
    hosts.processes["first", "trainer"].terminate()
    codes = {host: await hosts.processes[host, "trainer"].wait() for host in TRAINER}
    wrong = [
        f"the trainer on {host} was stopped with exit code {code}" for host, code in codes.items() if code
    ]
    for host in TRAINER:
        await start_trainer(hosts, host)
    await more_steps(ledger, "the trainer was stopped and started")
    last = await tell_last_step(ledger, place)
    print(f"the last step is {last}", flush=True)
    codes = {host: await hosts.processes[host, "trainer"].wait() for host in TRAINER}
    wrong += [f"the trainer on {host} ended with exit code {code}" for host, code in codes.items() if code]
    wrong += await hosts.stop("rollout") + await hosts.stop("reward") + await hosts.stop("ingest")
    status = await ledger.status()
    await ledger.close()
    await hosts.stop("redis")
    report = await asyncio.to_thread(check_run, place.run_dir, status)
    print(f"hosts={len(HOSTS)} steps={report.steps} trained={report.trained}", flush=True)
    left = [f"process {child.pid} is left: {' '.join(child.cmdline())}" for child in living_children()]
    left += [f"{path.name} is left in the run directory" for path in place.run_dir.glob("hosts-*")]
    return wrong + report.violations + left


if __name__ == "__main__":
    sys.exit(main(run, HOSTS))
