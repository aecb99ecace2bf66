"""Lifecycles/s of the ledger, and calls for each group, against EVALSHA of a trivial script on the same
server.

One client process, 64 tasks that lease and accept, one that makes the trainer's calls of a step for every 32
groups. The server is the embedded one, fsync before every reply. The reference is `redis-benchmark` (a client
in C): a script that writes one field. Both ways alternate on the same server.
"""

import asyncio
import csv
import itertools
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import redis
import uvloop

from protocol.codec import encode_payload
from protocol.ids import new_token
from protocol.messages import StepReport
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Peer, RunSpec
from services.ledger.redis.ledger import RedisLedger
from tests.benchmarks.table import Figure, Run, figure

REPEATS = 7
WORKERS = 64
GROUPS_PER_STEP = 32
MAX_STALENESS = 4
CHECKPOINT_STEPS = 20
STEPS = 200
REFERENCE_CALLS = 40_000
CONNECTIONS = 16
"""Connections of the reference; the ledger's client uses two."""
EPOCH, ENGINE = "epoch-1", "engine.bench"
TRIVIAL = """
local name = KEYS[1]
local field = ARGV[1]
local amount = tonumber(ARGV[2])
if not amount then
  return {'refused', 'not a number'}
end
local before = tonumber(redis.call('HGET', name, field) or '0')
redis.call('HSET', name, field, before + amount)
return {'ok', before}
"""


class Lifecycles:
    """A run whose groups go from lease to commit without a pause."""

    def __init__(self, ledger: RedisLedger, steps: int) -> None:
        self._ledger = ledger
        self._steps = steps
        self._left = itertools.count()
        self._room = asyncio.Semaphore(
            MAX_STALENESS * GROUPS_PER_STEP
        )  # as much as rule F allows, so that nothing is refused
        self._scored = asyncio.Semaphore(0)
        self._requests = itertools.count()

    async def prepare(self) -> None:
        """Create the run; one engine serves version 0."""
        ledger = self._ledger
        bound = Bound(MAX_STALENESS, GROUPS_PER_STEP, Policy.MASK)
        await ledger.create(
            RunSpec(run=ledger.run, fingerprint="bench", prompts=None, steps=self._steps, bound=bound)
        )
        await ledger.claim(EPOCH)
        await ledger.resume(EPOCH, 0, 1)
        await ledger.register(Peer(Role.ROLLOUT, ENGINE, {"pid": 1, "busy": 1.0, "version": 0}), 600_000)
        await ledger.applied(ENGINE, EPOCH, 0)

    async def run(self) -> float:
        """Take `steps` batches through their whole life; returns the seconds."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(WORKERS):
                tasks.create_task(self._work_loop(), name=f"worker-{index}")
            tasks.create_task(self._train_loop(), name="trainer")
        return time.perf_counter() - began

    async def _work_loop(self) -> None:
        while next(self._left) < self._steps * GROUPS_PER_STEP:
            await self._room.acquire()
            request = f"r{next(self._requests)}"
            lease = await self._ledger.lease(request=request, engine=ENGINE, holder=ENGINE, lease_ms=60_000)
            await self._ledger.accept(lease.group, lease.token, {lease.version: 1024})
            self._scored.release()

    async def _train_loop(self) -> None:
        """The calls of `services/trainer/train_loop.py`, and the engine's answer."""
        ledger = self._ledger
        for step in range(self._steps):
            for _ in range(GROUPS_PER_STEP):
                await self._scored.acquire()
            taken = await ledger.take(EPOCH)
            await ledger.status()
            await ledger.status()
            await ledger.peers(Role.ROLLOUT)
            trained = {group.group: dict(group.counts) for group in taken.groups}
            report = StepReport(step=step, version=step + 1, epoch=EPOCH, reward_mean=0.5)
            version = await ledger.commit(
                EPOCH, step, trained, digest=step, report=encode_payload(report), manifest=bytes(4096)
            )
            await ledger.status()
            await ledger.applied(ENGINE, EPOCH, version)
            if version % CHECKPOINT_STEPS == 0:
                await ledger.checkpointed(version)
            for _ in range(GROUPS_PER_STEP):
                self._room.release()


def _script_calls(server: "redis.Redis") -> tuple[int, float]:
    """Scripts called since the server's start, and the server's CPU seconds in them."""
    stats = server.info("commandstats")
    rows = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
    return sum(row["calls"] for row in rows), sum(row["usec"] for row in rows) / 1e6


async def _lifecycles(url: str, steps: int) -> dict[str, float]:
    with redis.Redis.from_url(url) as server:
        ledger = await RedisLedger.connect(url, f"bench-{new_token()}", archive_limit=1 << 40)
        try:
            load = Lifecycles(ledger, steps)
            await load.prepare()
            calls, script_s = await asyncio.to_thread(_script_calls, server)
            cpu_s = time.process_time()
            seconds = await load.run()
            cpu_s = time.process_time() - cpu_s
            calls_after, script_s_after = await asyncio.to_thread(_script_calls, server)
        finally:
            await ledger.close()
    groups = steps * GROUPS_PER_STEP
    return {
        "lifecycles_per_s": groups / seconds,
        "calls_per_group": (calls_after - calls) / groups,
        "client_cpu_share": cpu_s / seconds,
        "client_cpu_us": cpu_s / groups * 1e6,
        "server_script_share": (script_s_after - script_s) / seconds,
    }


def _evalsha_per_s(program: str, url: str, calls: int) -> float:
    """Calls/s of the trivial script by redis-benchmark."""
    place = urlsplit(url)
    with redis.Redis.from_url(url) as server:
        sha = str(server.script_load(TRIVIAL))
    command = [
        program,
        "-h",
        str(place.hostname),
        "-p",
        str(place.port),
        "-a",
        place.password or "",
        "-c",
        str(CONNECTIONS),
    ]
    command += ["-n", str(calls), "--csv", "EVALSHA", sha, "1", "bench", "field", "1"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    (row,) = csv.DictReader(output.splitlines())
    return float(row["rps"])


async def _alternate(directory: Path, repeats: int, steps: int, calls: int) -> list[Run]:
    program = shutil.which("redis-benchmark")
    runs: list[Run] = []
    for index in range(repeats):
        server = EmbeddedServer(directory / f"ledger-{index}")
        url = await server.start()
        try:
            result = await _lifecycles(url, steps)
            if program is not None:
                result["evalsha_per_s"] = await asyncio.to_thread(_evalsha_per_s, program, url, calls)
                result["evalsha_lifecycles_per_s"] = result["evalsha_per_s"] / result["calls_per_group"]
        finally:
            await server.stop()
        runs.append(result)
    return runs


def run(directory: Path, *, quick: bool = False) -> tuple[dict[str, Figure], list[str]]:
    """Figures, and what the reader has to know."""
    size = (1, 20, 5_000) if quick else (REPEATS, STEPS, REFERENCE_CALLS)
    runs = uvloop.run(_alternate(directory, *size))
    figures = {
        "ledger.calls_per_group": figure(runs, "calls_per_group", unit="script calls"),
        "ledger.lifecycles_per_s": figure(
            runs, "lifecycles_per_s", unit="groups/s", reference="evalsha_lifecycles_per_s"
        ),
        "ledger.client_cpu_us": figure(runs, "client_cpu_us", unit="CPU us a group"),
    }
    if "evalsha_per_s" not in runs[0]:
        return figures, [
            "redis-benchmark is not installed (Debian: redis-tools): the ledger has no reference"
        ]
    figures["ledger.evalsha_per_s"] = figure(runs, "evalsha_per_s", unit="calls/s")
    return figures, []
