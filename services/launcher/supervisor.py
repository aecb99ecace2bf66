"""Runs `tether up`: every service of a run on one machine, until its steps are done or Ctrl-C.

All checks that need no started service run first; then ledger, run and services start. At the end rollout
workers release their groups; then reward, trainer, evaluation, ingest, monitor, tracking and ledger stop,
also after a failure. The end of a run leaves no process and no weights in shared memory.
"""

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from protocol.errors import TetherError, innermost
from protocol.host.owned_directory import remove_dead
from services.launcher.finishing import describe_unscored, finish_evaluation
from services.launcher.fleet import Fleet
from services.launcher.scaling import run_lock, scale_loop
from services.launcher.tracking_warnings import describe_tracking, warn_loop
from services.ledger.embedded_server import EmbeddedServer, keep_running_loop
from services.ledger.event_log.archiver import Archiver
from services.ledger.interface import Ledger, Peer, RunSpec
from services.ledger.redis.ledger import RedisLedger
from services.ledger_recovery.reconcile import reconcile
from services.preflight.machine import check_directory
from services.preflight.memory import describe_memory
from services.preflight.model import read_model
from services.prepare import prepare
from services.run_record.end import explaining_full_disk, recording_end, refuse_made_from_record
from services.run_record.halts import explain_halt
from services.run_record.progress import Progress, plot_run, report_failures_loop
from services.run_record.tail import EventTail
from services.runtime.event_loop import is_set_within, running_loops
from services.runtime.process import pid_space
from services.runtime.run_copies import describe_copies, settings_of_fetched
from services.runtime.run_ledger import open_ledger
from services.runtime.start_run import start_or_resume
from services.settings.hub import pin_names, record_pins
from services.settings.sections import Settings

LIMIT_S = 60.0
"""Timeout of unregistering all dead processes, seconds."""


async def unregister_loop(ledger: Ledger, exited: asyncio.Event) -> None:
    """Unregister dead processes now and whenever `exited` is set, until cancelled."""
    while True:
        exited.clear()
        try:
            async with asyncio.timeout(LIMIT_S):
                await unregister_dead(ledger)
        except (TetherError, TimeoutError) as error:
            log.warning("service.not_unregistered error=%r", error)
        await exited.wait()


async def unregister_dead(ledger: Ledger) -> None:
    """Unregister every dead process of this host; its leases expire."""
    for peer in await ledger.peers():
        if _is_dead(peer):
            await ledger.unregister(peer.incarnation)
            log.info("service.unregistered incarnation=%s", peer.incarnation)


def _is_dead(peer: Peer) -> bool:
    """Return whether a registered process has certainly exited.

    A live process that reused the id counts as the registered one. Ids of other hosts or containers are never
    compared.
    """
    pid, space = peer.info.get("pid"), peer.info.get("pid_space")
    is_here = bool(space) and space == pid_space()
    return is_here and isinstance(pid, int) and 0 < pid < 1 << 31 and not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Return whether a process `pid` exists and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


log = logging.getLogger("tether.up")

EXIT_S, POLL_S = 5.0, 0.05
"""Seconds for killed processes to exit, and between two checks."""
STEP_POLL_S = 1.0
"""Seconds between two queries whether a step was made."""


class _Halted(TetherError):
    """The run halted, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a run."""

    version: int
    """Number of committed steps."""
    steps: int
    """Number of requested steps."""
    interrupted: bool
    """Whether a signal stopped the run before it was done."""
    exhausted: bool
    """Whether the prompts were exhausted."""


async def run_up(settings: Settings, progress: Progress, compose: Callable[[], Settings]) -> RunOutcome:
    """Start all services of a run and keep them running until it is done.

    A run with an empty directory is first fetched from `run.remote`.

    Args:
        settings: settings of the run.
        progress: reports to the user.
        compose: composes the settings again, after a fetch.

    Raises:
        SettingsError: a setting is wrong, found before the start or by a service; no process is left running.
        TetherError: a service died too often, or the run halted; no process is left running.
    """
    run_dir = settings.run_dir
    refuse_made_from_record(run_dir)  # before anything is written
    check_directory(run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir):
        with explaining_full_disk(run_dir):
            original = await asyncio.to_thread(settings_of_fetched, settings, compose)
            settings = await asyncio.to_thread(pin_names, original)
            spec = await asyncio.to_thread(prepare, settings, local=True)
        with recording_end(run_dir, lambda: progress.is_full, lambda: progress.is_on):
            outcome = await _run_prepared(original, settings, spec, progress)
        await asyncio.to_thread(plot_run, run_dir)
    return outcome


async def _run_prepared(
    original: Settings, settings: Settings, spec: RunSpec, progress: Progress
) -> RunOutcome:
    """Start the ledger, create or resume the run, supervise it to its end, and archive its event log.

    Args:
        original: settings as the user gave them.
        settings: the same settings with hub names pinned to commits.
        spec: specification of the run for the ledger.
        progress: reports to the user.
    """
    run_dir = settings.run_dir
    async with _ledger_server(settings) as server:
        url = server.url if server else settings.ledger.url
        async with open_ledger(replace(settings, ledger=replace(settings.ledger, url=url))) as ledger:
            await reconcile(ledger, settings)
            lines = await start_or_resume(ledger, settings, spec)
            progress.is_on = True
            record_pins(original, settings)
            facts = describe_memory(settings, read_model(settings))
            for line in (*lines, ledger.durability, *facts):
                progress.note(line)
            try:
                outcome = await _supervise(settings, url, ledger, server, progress, spec.prompts)
            except _Halted as halted:  # the explanation needs the whole log, and the ingest has ended
                await Archiver(ledger, run_dir).archive_all()
                raise TetherError(await asyncio.to_thread(_explain, run_dir, str(halted))) from None
            await Archiver(ledger, run_dir).archive_all()
    return outcome


async def _supervise(
    settings: Settings,
    url: str,
    ledger: RedisLedger,
    server: EmbeddedServer | None,
    progress: Progress,
    prompts: int | None,
) -> RunOutcome:
    """Keep the services running until the run is done, interrupted or failed; then drain them in order."""

    async def is_over() -> bool:
        status = await ledger.status()
        return status.done or status.draining

    fleet = Fleet(settings, url, is_over)
    first = (await ledger.status()).version
    await ledger.guard()  # a restarted server is used only after the ingest has checked it
    stop = _stop_on_signals(fleet, progress)
    try:
        # outer group: a failed watcher must not cancel the services, which are drained first
        async with asyncio.TaskGroup() as services:
            try:
                async with running_loops(_watchers(settings, ledger, server, fleet, progress)):
                    fleet.start(services, functools.partial(_wait_for_step, ledger, first))
                    await _wait_until_over(ledger, settings, fleet, stop, progress)
                    await fleet.stop()
            finally:
                await fleet.stop()
    except* TetherError as group:
        progress.print_last()
        raise innermost(group) from None
    finally:
        await _remove_shared_memory(settings.run.name)
    status = await ledger.status()
    progress.finish(status)
    unscored = "" if stop.is_set() else describe_unscored(settings, first, status.version, fleet.evaluation)
    for line in (unscored, *describe_tracking(settings), *describe_copies(settings)):
        progress.note(line)
    return RunOutcome(
        status.version,
        status.steps,
        interrupted=stop.is_set() and not status.done,
        exhausted=prompts is not None and status.issued >= prompts,
    )


async def _wait_for_step(ledger: RedisLedger, first: int) -> None:
    """Return once the run is beyond version `first`."""
    while True:
        if (await ledger.status()).version > first:
            return
        await asyncio.sleep(STEP_POLL_S)


def _stop_on_signals(fleet: Fleet, progress: Progress) -> asyncio.Event:
    """Return an event set by the first SIGINT or SIGTERM; the second signal kills the fleet."""
    stop = asyncio.Event()

    def on_signal() -> None:
        progress.say_stopping(at_once=stop.is_set())
        if stop.is_set():
            fleet.kill()
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal)
    return stop


def _watchers(
    settings: Settings,
    ledger: RedisLedger,
    server: EmbeddedServer | None,
    fleet: Fleet,
    progress: Progress,
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return the loops that run with the services until cancelled; the failure of one ends the run."""
    loops = {
        "progress": progress.watch_loop(ledger, fleet.children),
        "scale": scale_loop(settings.run_dir, fleet),
        "failures": report_failures_loop(ledger, progress.note),
        "services": _watch_failure(fleet, progress),
        "dead services": unregister_loop(ledger, fleet.exited),
    }
    if settings.tracking.kind:
        loops["tracking"] = warn_loop(settings, progress.note)
    if server is not None:
        loops["ledger"] = keep_running_loop(server)
    return loops


async def _watch_failure(fleet: Fleet, progress: Progress) -> None:
    """Report the first service that died too often, and raise its error."""
    error = await fleet.failure()
    progress.note(f"{error}; the other services are drained, Ctrl-C twice to stop now")
    raise error


async def _remove_shared_memory(run: str) -> None:
    """Remove weights in shared memory left by a killed trainer, once it has exited."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(EXIT_S):
            while await asyncio.to_thread(remove_dead, run):  # noqa: ASYNC110 (the kernel tells only the parent)
                await asyncio.sleep(POLL_S)


async def _wait_until_over(
    ledger: RedisLedger, settings: Settings, fleet: Fleet, stop: asyncio.Event, progress: Progress
) -> None:
    """Wait for the trainer and, up to `eval.finish_s`, the evaluation to finish, or for a stop.

    Raises:
        _Halted: the run halted.
    """
    is_over = False
    while not is_over:
        is_over = stop.is_set() or fleet.trainer.finished.is_set()
        status = await ledger.status()  # read last: the trainer may halt the run with its last step
        if status.halted:
            raise _Halted(status.halted)
        if is_over:
            return await finish_evaluation(settings, fleet.evaluation, stop, progress.note)
        await is_set_within(stop, 0.5)


def _explain(run_dir: Path, reason: str) -> str:
    """Return why the run halted, with details of the drops from the event log."""
    tail = EventTail(run_dir).read_all()
    return explain_halt(reason, tail.state()["drop_details"])


@contextlib.asynccontextmanager
async def _ledger_server(settings: Settings) -> AsyncIterator[EmbeddedServer | None]:
    """Run an embedded server within the block; yield None if the user configured a server."""
    if settings.ledger.url:
        yield None
        return
    server = EmbeddedServer(settings.run_dir / "ledger")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
