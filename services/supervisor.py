"""`tether up`: every service of a run on one machine, until its steps are done or Ctrl-C.

Starting: check everything that can be checked without starting anything, then ledger, run, services. Ending: rollout workers hand back
what they hold, then rewards, trainer, ingest, monitor, ledger. Nothing is left running, whatever ends it.
"""

import asyncio
import contextlib
import fcntl
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import Refused, SettingsError, TetherError
from protocol.topics import Role
from services.children import Child, ServiceSpec
from services.keeping import settle
from services.ledger.audit import Archiver
from services.ledger.ledger import RedisLedger
from services.ledger.server import EmbeddedServer
from services.observability.plot import plot_run
from services.observability.progress import Progress
from services.prepare import prepare
from services.process import connected
from services.settings import Settings, dump_settings

log = logging.getLogger("tether.up")

STOP_ORDER = (Role.ROLLOUT, Role.REWARD, Role.TRAINER, Role.INGEST, Role.MONITOR)
DRAIN_S = {Role.ROLLOUT: 20.0, Role.REWARD: 15.0, Role.TRAINER: 60.0, Role.INGEST: 15.0, Role.MONITOR: 5.0}
LEDGER_CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    version: int
    steps: int
    interrupted: bool


async def run_up(settings: Settings, progress: Progress) -> Outcome:
    """Start all services of a run and keep them running until it is done.

    Raises:
        SettingsError: before anything was started, or as a service said; nothing is left running.
        TetherError: a service died for good, or the run halted; nothing is left running.
    """
    run_dir = settings.run_dir
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with _locked(run_dir):
        spec = await asyncio.to_thread(prepare, settings)
        async with _ledger_server(settings) as server:
            url = server.url if server else settings.ledger.url
            dump_settings(settings, run_dir / "settings.json")
            async with connected(replace(settings, ledger=replace(settings.ledger, url=url))) as ledger:
                await settle(ledger, settings)
                await ledger.create(spec)
                await ledger.drain(False)
                await ledger.guard()
                progress.note(ledger.durability)
                outcome = await _supervise(settings, url, ledger, server, progress)
                await Archiver(ledger, run_dir).archive_all()
        await asyncio.to_thread(plot_run, run_dir)
    return outcome


def service_specs(settings: Settings, url: str) -> dict[Role, list[ServiceSpec]]:
    """The processes of a run, by role."""
    environ = {"TETHER_REDIS_URL": url, "TETHER_CONFIG": str(settings.run_dir / "settings.json")}
    counts = {Role.INGEST: 1, Role.REWARD: settings.services.rewards, Role.TRAINER: 1, Role.ROLLOUT: settings.services.rollouts}
    if settings.monitor.enabled:
        counts[Role.MONITOR] = 1
    return {
        role: [
            ServiceSpec(
                f"{role}.{i}" if role in (Role.REWARD, Role.ROLLOUT) else role, f"services.{role}", environ, finishes=role is Role.TRAINER
            )
            for i in range(count)
        ]
        for role, count in counts.items()
    }


async def _supervise(settings: Settings, url: str, ledger: RedisLedger, server: EmbeddedServer | None, progress: Progress) -> Outcome:
    """Keep the services running until the run is done, interrupted or failed; then stop them in order."""

    async def is_over() -> bool:
        status = await ledger.status()
        return status.done or status.draining

    children = {
        role: [Child(spec, settings.run_dir / "logs" / f"{spec.name}.log", settings.services.restarts, is_over) for spec in specs]
        for role, specs in service_specs(settings, url).items()
    }
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        """The first asks for a drain, the second ends everything."""
        if stop.is_set():
            for group in children.values():
                for child in group:
                    child.kill()
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    try:
        async with asyncio.TaskGroup() as tasks:
            for group in children.values():
                for child in group:
                    tasks.create_task(child.keep_running(), name=child.spec.name)
            watchers = [tasks.create_task(progress.watch_loop(ledger, children), name="progress")]
            if server is not None:
                watchers.append(tasks.create_task(_keep_ledger(server), name="ledger"))
            try:
                await _until_over(ledger, children[Role.TRAINER][0], stop)
            finally:
                await _stop_all(children)
            for watcher in watchers:
                watcher.cancel()
    except* TetherError as group:
        raise group.exceptions[0] from None
    finally:
        await _stop_all(children)
    status = await ledger.status()
    progress.finish(status)
    return Outcome(status.version, status.steps, interrupted=stop.is_set() and not status.done)


async def _until_over(ledger: RedisLedger, trainer: Child, stop: asyncio.Event) -> None:
    """Return when the trainer has finished or a stop was asked for.

    Raises:
        TetherError: if the run halted.
    """
    while not stop.is_set() and not trainer.finished.is_set():
        status = await ledger.status()
        if status.halted:
            raise TetherError(
                f"the run halted: too many of the last groups were dropped for the reason {status.halted!r} "
                "(see `tether status` and the logs); mend the cause and start in a new run directory"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stop.wait()
    if not stop.is_set():
        return
    with contextlib.suppress(Refused):
        await ledger.drain()


async def _keep_ledger(server: EmbeddedServer) -> None:
    """Start the embedded server again if it dies; it comes back where it was, and everybody reconnects. Runs until cancelled.

    Raises:
        TetherError: if its port was taken meanwhile.
    """
    url = server.url
    while True:
        await asyncio.sleep(LEDGER_CHECK_S)
        if not server.running():
            log.warning("ledger.died restarting in %s", server.directory)
            if await server.start() != url:
                raise TetherError("the ledger server died and its port was taken meanwhile: start the run again, it goes on where it was")


async def _stop_all(children: dict[Role, list[Child]]) -> None:
    for role in STOP_ORDER:
        async with asyncio.TaskGroup() as stops:
            for child in children.get(role, []):
                stops.create_task(child.stop(DRAIN_S[role]), name=f"stop-{child.spec.name}")


@contextlib.asynccontextmanager
async def _ledger_server(settings: Settings) -> AsyncIterator[EmbeddedServer | None]:
    """An embedded server that lives as long as this, or None where the user has one."""
    if settings.ledger.url:
        yield None
        return
    server = EmbeddedServer(settings.run_dir / "ledger")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; a second `tether up` on it is refused."""
    with (run_dir / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(f"another `tether up` is running in {run_dir}: stop it, or give --run-dir") from None
        yield
