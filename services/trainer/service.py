"""Runs the trainer, `python -m services.trainer`: one process per rank, under torchrun.

If more than one rank is configured, the process starts torchrun itself, on each host of `[cluster]`.

Consumes: scored groups, by `take`, from the spool. Produces: versions, their weights and reports. Waits for:
B scored groups.
"""

import logging
import os
import signal
import sys

from protocol.errors import Reason, Refused, SettingsError, TetherError, innermost
from protocol.host.prctl import die_with_parent
from protocol.ids import new_epoch
from protocol.topics import WEIGHTS, Role
from services.bus.broadcast import Broadcaster
from services.ledger_recovery.fencing import fence_reason
from services.preflight.memory import check_host_memory
from services.run_record.steps import StepLog
from services.runtime.errors import configure_logging, exit_with
from services.runtime.event_loop import running_loops
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.writing import StoppedWaiting, retry_until_written
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.trainer.checkpointing import Checkpointer
from services.trainer.gpu_turn import TrainerGpuTurn, first_turn
from services.trainer.model_runner import ModelRunner, load_model
from services.trainer.open_run import OpenRun, open_spool, watch_spool_loop
from services.trainer.snapshots import Snapshots
from services.trainer.start_hosts import run_on_hosts
from services.trainer.start_ranks import follow_rank_0, run_ranks
from services.trainer.takeover import take_over
from services.trainer.train_loop import TrainLoop
from trainer.execution.commands import ExitCommand
from trainer.hosts.place import find_place
from trainer.registry import import_backend
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints

log = logging.getLogger("tether.trainer")


async def serve(process: Process) -> None:
    """Run rank 0: take the run over, then make steps until the run is done or the process is to stop.

    Raises:
        SettingsError: there is no run directory, or the settings do not allow the run.
        TetherError: another trainer has taken the run over. Work since this trainer's last commit is void.
    """
    run_dir = process.settings.run_dir
    if not run_dir.is_dir():
        raise SettingsError(f"no run directory {run_dir}: start the ingest first, or `tether up`")
    async with first_turn(process) as turn:
        await _lead(process, turn)


async def _lead(process: Process, turn: TrainerGpuTurn | None) -> None:
    """Load the model, open the run and train. `turn` is set in a colocated run."""
    settings, run_dir = process.settings, process.settings.run_dir
    runner = await load_model(process, turn)
    async with process.binding_socket(Broadcaster, WEIGHTS) as broadcaster:
        run = OpenRun(
            process=process,
            epoch=new_epoch(),
            spool=await open_spool(process),
            archive=Archive(run_dir / "archive", settings.trainer.archive_mb),
            checkpoints=Checkpoints(run_dir / "checkpoints", keep=settings.trainer.keep_checkpoints),
            steps=StepLog(run_dir / "metrics.jsonl"),
            broadcaster=broadcaster,
        )
        if turn is not None:
            turn.broadcaster = broadcaster
        process.info["endpoints"] = {WEIGHTS.name: broadcaster.endpoint}
        try:
            loops = {"ranks.idle": runner.idle_loop(), "spool.watch": watch_spool_loop(process, run.spool)}
            async with running_loops(loops):
                await _train(run, runner)
            await runner.lead(ExitCommand())
        finally:
            run.spool.close()
            await runner.close()


async def _train(run: OpenRun, runner: ModelRunner) -> None:
    """Take the run over and make steps; raise a single error if another trainer takes the run over."""
    try:
        await _take_over_and_step(run, runner)
    except* Refused as refusals:
        if refusals.subgroup(_is_fenced) is None:
            raise
        cause = await fence_reason(run.process.ledger, run.process.settings.run_dir, run.process.run)
        raise TetherError(f"{cause}; this one ends, its epoch was {run.epoch}") from None


def _is_fenced(error: BaseException) -> bool:
    return isinstance(error, Refused) and error.reason is Reason.STALE_EPOCH


async def _take_over_and_step(run: OpenRun, runner: ModelRunner) -> None:
    """Make steps with a checkpointer; a stop during a wait for disk space is a normal stop."""
    async with Checkpointer(run, runner) as checkpointer:
        try:
            await _make_steps(run, runner, checkpointer)
        except* StoppedWaiting as stopped:  # uncommitted work is repeated after the next start
            log.warning("run.stopped_without_room error=%s", innermost(stopped))


async def _make_steps(run: OpenRun, runner: ModelRunner, checkpointer: Checkpointer) -> None:
    process = run.process
    with process.waiting("take-over"):
        model = await take_over(run, runner, checkpointer)
    await process.register()
    async with Snapshots(run, runner) as snapshots:
        is_last = (await process.ledger.status()).done
        await snapshots.take_over(model.version, model.digest, is_last=is_last)
        await _step(run, runner, TrainLoop(run, runner, checkpointer, snapshots, model))


async def _step(run: OpenRun, runner: ModelRunner, loop: TrainLoop) -> None:
    """Make steps, receive engines' answers, and watch the shared engine."""
    process = run.process
    reports = await process.ledger.reports(0)
    await retry_until_written(process, lambda: run.steps.backfill(reports), run.check_ownership)
    loops = {"weights.answers": loop.answers_loop(), "audit": loop.audit.audit_loop()}
    if runner.shared_engine is not None:
        loops["engine.watch"] = runner.shared_engine.watch_loop()
    async with running_loops(loops):
        await loop.run()


def preload(settings: Settings) -> None:
    """Import the modules of the trainer's backend for a spare."""
    import_backend(settings.trainer.backend, with_critic=settings.needs_critic)


def main() -> None:
    """Start this host's ranks if several are configured, or run the rank that the environment names."""
    rank = int(os.environ.get("RANK", "-1"))
    if rank >= 0:  # torchrun starts each rank in a new session, which no other process would end
        die_with_parent(signal.SIGKILL)
    if rank > 0:
        follow_rank_0(rank)
        return
    if rank < 0:
        try:
            settings = load_settings()
            place = find_place(settings.cluster, settings.trainer_ranks, os.environ)
            check_host_memory(settings, place.hosts)
            if place.hosts > 1:
                configure_logging(os.environ.get("TETHER_INSTANCE", Role.TRAINER))
                sys.exit(run_on_hosts(settings, place))
            if settings.trainer_ranks > 1:
                sys.exit(run_ranks(settings))
        except TetherError as error:
            exit_with(error, "tether trainer")
    service_main(Role.TRAINER, serve)
