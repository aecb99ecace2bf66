"""A run whose trainer is a process of its own behind a gate, to be killed wherever that holds it; all else
runs in the test's process."""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protocol.topics import Role
from services import ingest, reward, rollout
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.redis.ledger import RedisLedger
from services.prepare import prepare
from services.runtime.process import open_process
from services.runtime.run_ledger import open_ledger
from services.settings.load import dump_settings
from services.settings.sections import Settings
from tests.integration.command import environment
from tests.integration.gate import Gate, Spot, When, gate_to
from tests.integration.loop import ROOT, settings_for
from tests.warm.popen import forking, server_forks

SERVICES = {Role.INGEST: ingest.serve, Role.REWARD: reward.serve, Role.ROLLOUT: rollout.serve}
OVERRIDES = (
    "engine.straggler_share=0",
    "engine.seconds_per_token=0.001",
    "trainer.step_s=0.02",
    "bus.peer_timeout_s=2",
)


class Place:
    """The run, its gate and the trainers that live."""

    def __init__(self, settings: Settings, ledger: RedisLedger, gate: Gate) -> None:
        self.settings = settings
        self.ledger = ledger
        self.gate = gate
        self.trainers: list[asyncio.subprocess.Process] = []

    @property
    def run_dir(self) -> Path:
        return self.settings.run_dir

    async def trainer(self, *, gated: bool = True) -> asyncio.subprocess.Process:
        """Start a trainer."""
        variables = {
            "TETHER_CONFIG": str(self.run_dir / "settings.json"),
            "TETHER_REDIS_URL": self.gate.url if gated else self.settings.ledger.url,
            "TETHER_INSTANCE": f"trainer.{len(self.trainers)}",
        }
        with self.log(len(self.trainers)).open("wb") as log, forking():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.trainer",
                cwd=ROOT,
                env=environment(**variables),
                stdout=log,
                stderr=log,
            )
        self.trainers.append(process)
        return process

    def log(self, number: int) -> Path:
        """What a trainer printed."""
        return self.run_dir / f"trainer.{number}.log"

    async def held(self, spot: Spot, *, after_step: int = 0) -> asyncio.subprocess.Process:
        """Start a trainer, and wait until the gate holds it at `spot`, when `after_step` steps of the run are
        made.

        On the way it is held at the commit of that step, so that it cannot run past `spot` meanwhile.
        """
        process: asyncio.subprocess.Process | None = None
        while (missing := after_step - (await self.ledger.head()).version) > 0:
            self.gate.close_at(Spot("commit", When.AFTER, nth=missing))
            process = process or await self.trainer()
            await self._reached(process)
        self.gate.close_at(spot)
        process = process or await self.trainer()
        await self._reached(process)
        return process

    async def _reached(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the gate holds a trainer."""
        while not self.gate.reached.is_set():
            assert process.returncode is None, (
                f"it ended before {self.gate.spot}: {self.log(len(self.trainers) - 1).read_text()}"
            )
            await asyncio.sleep(0.01)

    async def at_version(self, version: int) -> None:
        """Wait until a version is committed."""
        while (await self.ledger.head()).version < version:  # noqa: ASYNC110 (the ledger tells nobody)
            await asyncio.sleep(0.01)

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        """kill -9, and open the gate for the next one."""
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self.gate.open()


@asynccontextmanager
async def place(run_dir: Path, *overrides: str) -> AsyncIterator[Place]:
    """Everything but the trainer is up. At the end everything is stopped, and the log is archived."""
    server_forks()  # later, its imports would stop the event loop of all services for seconds
    settings = settings_for(run_dir, "stragglers.toml", *OVERRIDES, *overrides)
    run_dir.mkdir(parents=True, exist_ok=True)
    spec = await asyncio.to_thread(prepare, settings)
    dump_settings(settings, run_dir / "settings.json")
    server = EmbeddedServer(run_dir / "ledger")
    await server.start()
    settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=server.url))
    try:
        async with gate_to(server.url) as gate, open_ledger(settings) as ledger:
            await ledger.create(spec)
            here = Place(settings, ledger, gate)
            stop = asyncio.Event()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for role in SERVICES:
                        tasks.create_task(_service(role, settings, stop), name=role)
                    yield here
                    stop.set()
            finally:
                for process in here.trainers:
                    if process.returncode is None:
                        process.send_signal(signal.SIGKILL)
                        await process.wait()
    finally:
        await server.stop()


async def _service(role: Role, settings: Settings, stop: asyncio.Event) -> None:
    async with open_process(role, settings, role) as process, asyncio.TaskGroup() as tasks:
        heartbeat = tasks.create_task(process.heartbeat_loop())
        serving = tasks.create_task(SERVICES[role](process))
        await stop.wait()
        process.stop.set()
        await asyncio.wait((serving,))
        heartbeat.cancel()
