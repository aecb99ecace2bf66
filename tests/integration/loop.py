"""A whole run inside one test process: the real services, sockets, ledger server and spool, each service with
a `Process` of its own.

What `tether up` adds (processes, restarts) is tested by the tests that start it.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers  # noqa: F401 (two services in threads of one process must not import it at once)

from protocol.topics import Role
from services import evaluation, ingest, reward, rollout, trainer
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import Archiver
from services.ledger.interface import LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import AuditResult, verify
from services.ledger_recovery.reconcile import reconcile
from services.prepare import make_run, prepare
from services.run_record.steps import read_steps
from services.runtime.process import Process, open_process
from services.runtime.run_ledger import open_ledger
from services.settings.load import load_settings
from services.settings.sections import Settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class LiveRun:
    """A run that is on."""

    settings: Settings
    ledger: RedisLedger
    processes: dict[Role, list[Process]]
    trained: asyncio.Event
    """Set when the trainer has returned."""


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    steps: list[dict[str, Any]]
    audit: AuditResult
    status: LedgerStatus
    events: list[dict[str, Any]]


def settings_for(run_dir: Path, config: str, *overrides: str) -> Settings:
    """Settings of a configuration in deploy/configs, with overrides."""
    return load_settings(
        str(ROOT / "deploy/configs" / config), [f'run.dir="{run_dir}"', *overrides], environ={}
    )


@asynccontextmanager
async def running(
    settings: Settings, *, rollouts: int = 1, rewards: int = 1, checked: bool = True
) -> AsyncIterator[LiveRun]:
    """Start or resume a run; at the end of the block everything is stopped in the order of `tether up`.

    Without `checked` a run starts that `tether up` would refuse, such as one that samples greedily.
    """
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    spec = await asyncio.to_thread(prepare if checked else make_run, settings)
    async with _served(settings) as url:
        settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))
        async with open_ledger(settings) as ledger:
            await reconcile(ledger, settings)
            await ledger.create(spec)
            await ledger.drain(False)
            live = LiveRun(settings, ledger, {role: [] for role in Role}, asyncio.Event())
            services: dict[Role, Callable[[Process], Coroutine[Any, Any, None]]] = {
                Role.INGEST: ingest.serve, Role.REWARD: reward.serve, Role.TRAINER: trainer.serve,
                Role.ROLLOUT: rollout.serve,
            }  # fmt: skip
            counts = {Role.INGEST: 1, Role.REWARD: rewards, Role.TRAINER: 1, Role.ROLLOUT: rollouts}
            if settings.eval.every:
                services[Role.EVALUATION], counts[Role.EVALUATION] = evaluation.serve, 1
            async with asyncio.TaskGroup() as tasks:
                started: dict[Role, list[asyncio.Task[None]]] = {}
                for role, serve in services.items():
                    started[role] = [
                        tasks.create_task(_run(live, role, f"{role}.{i}", serve), name=f"{role}.{i}")
                        for i in range(counts[role])
                    ]
                started[Role.TRAINER][0].add_done_callback(lambda _: live.trained.set())
                yield live
                for role in (Role.ROLLOUT, Role.REWARD, Role.TRAINER, Role.EVALUATION, Role.INGEST):
                    for process in live.processes[role]:
                        process.stop.set()
                    if started.get(role):
                        await asyncio.wait(started[role])
            await Archiver(ledger, settings.run_dir).archive_all()


@asynccontextmanager
async def _served(settings: Settings) -> AsyncIterator[str]:
    """The URL of the run's ledger: the one that is set, or that of a server for this run alone."""
    if settings.ledger.url:
        yield settings.ledger.url
        return
    server = EmbeddedServer(settings.run_dir / "ledger")
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


async def _run(
    live: LiveRun, role: Role, name: str, serve: Callable[[Process], Coroutine[Any, Any, None]]
) -> None:
    async with open_process(role, live.settings, name) as process:
        live.processes[role].append(process)
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(process.heartbeat_loop())
            await serve(process)
            heartbeat.cancel()


async def run_to_end(
    settings: Settings, *, seconds: float = 400, rollouts: int = 1, rewards: int = 1, checked: bool = True
) -> Finished:
    """Run until all steps are made; fails if they are not within `seconds`."""
    async with asyncio.timeout(seconds):
        async with running(settings, rollouts=rollouts, rewards=rewards, checked=checked) as live:
            await live.trained.wait()
            status = await live.ledger.status()
    path = settings.run_dir / "audit.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return Finished(read_steps(settings.run_dir / "metrics.jsonl"), verify(path), status, events)
