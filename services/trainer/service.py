"""`python -m services.trainer`: the optimizer. Under torchrun one process a rank; alone it starts torchrun
where needed.

Consumes: scored groups, by `take`, from the spool. Produces: versions, their weights and reports. Waits for:
B scored groups.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import Reason, Refused, SettingsError, TetherError
from protocol.host.parent_death import die_with_parent
from protocol.ids import new_epoch
from protocol.topics import WEIGHTS, Role
from services.bus.broadcast import Broadcaster
from services.gpu_sharing.device_lock import DeviceLock, given_device
from services.gpu_sharing.memory_budget import GIB, check_budget
from services.gpu_sharing.turn import POLL_S
from services.observability.steps import StepLog
from services.runtime.errors import EXIT_FAILED, EXIT_SETTINGS, configure_logging
from services.runtime.main import service_main
from services.runtime.process import Process
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.trainer.gpu_turn import TrainerGpuTurn
from services.trainer.leader import LeaderRank, build_backend
from services.trainer.shared_engine import SharedEngine
from services.trainer.takeover import take_over
from services.trainer.train_loop import TrainLoop
from trainer.algorithms.registry import make_algorithm
from trainer.backends.launch import torchrun
from trainer.backends.rank_commands import ExitCommand, broadcast_command, follow_commands
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool
from trainer.weights.registry import make_sender
from trainer.weights.shared import SharedSender


def check_memory(settings: Settings) -> None:
    """Whether trainer and engines fit on the GPU that they share. Raises SettingsError if not; on a CPU
    nothing is checked."""
    if not torch.cuda.is_available():
        return
    if settings.weights.transport == "nccl":
        raise SettingsError(
            "setting weights.transport: NCCL does not connect processes on one GPU; use ipc (or shm) in a colocated run"
        )
    on_each = -(
        -settings.services.rollout_workers
        * settings.engine.tensor_parallel_size
        // settings.parallel.world_size
    )
    shapes = checkpoint_shapes(settings.model_dir)
    check_budget(
        total_gb=torch.cuda.mem_get_info()[1] / GIB,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        workers=on_each,
        engine=settings.engine,
        trainer=settings.trainer,
        parallel=settings.parallel,
        algorithm=settings.algorithm,
        weights=settings.weights,
        adapters=bool(settings.lora.rank),
    )


async def serve(process: Process) -> None:
    """Rank 0: take the run over, then make steps until it is done or told to stop."""
    settings = process.settings
    run_dir = settings.run_dir
    if not run_dir.is_dir():
        raise SettingsError(f"no run directory {run_dir}: start the ingest first, or `tether up`")
    if not settings.colocated.enabled:
        await _lead(process, None)
        return
    await asyncio.to_thread(check_memory, settings)
    with contextlib.closing(given_device(run_dir) or DeviceLock(run_dir)) as device:
        turn = TrainerGpuTurn(process, device)
        await turn.acquire()
        await _lead(process, turn)


async def _lead(process: Process, turn: TrainerGpuTurn | None) -> None:
    """The same from where a model may be loaded; `turn`: of a colocated run."""
    settings, run_dir = process.settings, process.settings.run_dir
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    with process.waiting("model load"):
        backend = await asyncio.get_running_loop().run_in_executor(compute, build_backend, settings)
    make = partial(
        make_sender,
        settings.weights,
        run=process.run,
        run_dir=run_dir,
        masters=backend.masters,
        parts=backend.master_parts,
    )
    sender = await asyncio.get_running_loop().run_in_executor(compute, make)
    async with Broadcaster(
        WEIGHTS, run=process.run, incarnation=process.incarnation, config=settings.bus
    ) as caster:
        process.metrics.watch("tether_bus_weights", "Bus counters, edge weights", caster.stats.as_dict)
        rank = LeaderRank(
            process=process,
            backend=backend,
            algorithm=make_algorithm(settings.algorithm),
            spool=Spool(run_dir / "spool.sqlite"),
            archive=Archive(run_dir / "archive", settings.trainer.archive_mb),
            sender=sender,
            checkpoints=Checkpoints(run_dir / "checkpoints", keep=settings.trainer.keep_checkpoints),
            caster=caster,
            epoch=new_epoch(),
            compute=compute,
            turn=turn,
            sharing=SharedEngine(process, sender, settings.weights.timeout_s)
            if isinstance(sender, SharedSender)
            else None,
        )
        if turn is not None:
            turn.caster = caster
        process.info["endpoints"] = {WEIGHTS.name: caster.endpoint}
        try:
            await _train(rank)
            await rank.on_compute(broadcast_command, ExitCommand())
        finally:
            rank.sender.close()
            rank.spool.close()
            await rank.on_compute(backend.close)
            compute.shutdown()


async def _train(rank: LeaderRank) -> None:
    """Raises TetherError if another trainer takes the run over; what this one did since its last commit is
    void."""
    try:
        await _take_over_and_step(rank)
    except* Refused as refusals:
        if (
            refusals.subgroup(lambda error: isinstance(error, Refused) and error.reason is Reason.STALE_EPOCH)
            is None
        ):
            raise
        raise TetherError(
            f"another trainer has taken over run {rank.process.run}; this one ends, its epoch was {rank.epoch}"
        ) from None


async def _take_over_and_step(rank: LeaderRank) -> None:
    process = rank.process
    with process.waiting("take-over"):
        manifest = await take_over(rank)
    await process.register()
    steps = StepLog(process.settings.run_dir / "metrics.jsonl")
    await asyncio.to_thread(steps.backfill, await process.ledger.reports(0))
    loop = TrainLoop(rank, steps, manifest)
    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(loop.answers_loop(), name="weights.answers")]
        if rank.sharing is not None:
            beside.append(tasks.create_task(rank.sharing.watch_loop(), name="engine.watch"))
        await loop.run()
        for task in beside:
            task.cancel()


def run_ranks(settings: Settings) -> int:
    """Run the trainer once a rank, until all have ended. Returns the exit code, which torchrun alone would
    not pass on.

    In a colocated run all ranks hold the device together, so it is not free before the last of them has
    ended.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as launch

    if settings.colocated.enabled:
        DeviceLock(settings.run_dir).allow_children()
    try:
        launch(torchrun(settings.parallel.world_size, "services.trainer")[3:])
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        return EXIT_SETTINGS if EXIT_SETTINGS in codes else EXIT_FAILED
    return 0


def await_device(settings: Settings) -> None:
    """A rank other than 0 of a colocated run: wait until the device is the ranks', as rank 0 does; nothing is
    allocated before.

    Raises:
        TetherError: engines have not left it within `colocated.wait_s`.
    """
    device = given_device(settings.run_dir) if settings.colocated.enabled else None
    end = time.monotonic() + settings.colocated.wait_s
    while device is not None and not device.try_acquire(exclusive=True):
        if time.monotonic() > end:
            raise TetherError(
                f"engines still held the device after {settings.colocated.wait_s:g} s (colocated.wait_s); rank 0 names them"
            )
        time.sleep(POLL_S)


def main() -> None:
    """Start torchrun if more than one rank is configured; else be the rank that the environment names."""
    rank = int(os.environ.get("RANK", "-1"))
    if rank >= 0:
        die_with_parent(
            signal.SIGKILL
        )  # torchrun gives each rank a session of its own, which nobody else ends
    if rank > 0:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                signum, signal.SIG_IGN
            )  # rank 0 decides when the ranks end: in the middle of a step none of them may leave
        configure_logging(f"trainer.{rank}")
        settings = load_settings()
        await_device(settings)
        backend = build_backend(settings)
        follow_commands(backend, make_algorithm(settings.algorithm))
        backend.close()
        return
    if rank < 0:
        try:
            settings = load_settings()
            if settings.parallel.world_size > 1:
                sys.exit(run_ranks(settings))
        except SettingsError as error:
            print(f"tether trainer: {error}", file=sys.stderr)
            sys.exit(EXIT_SETTINGS)
    service_main(Role.TRAINER, serve)
