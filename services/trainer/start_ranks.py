"""Runs the trainer on several ranks: starts torchrun, and runs the ranks that follow rank 0."""

import os
import signal
from collections.abc import Collection, Sequence

from protocol.errors import TetherError
from services.gpu_sharing.device_lock import DeviceLock
from services.runtime.errors import (
    EXIT_FAILED,
    EXIT_SETTINGS,
    EXIT_UNAVAILABLE,
    FIRST_SIGNAL_CODE,
    configure_logging,
    exit_with,
)
from services.runtime.training import build_follower, build_models
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.trainer.gpu_turn import await_device
from trainer.execution.executor import Executor
from trainer.ranks.launch import ONE_THREAD, torchrun
from trainer.weights.registry import make_sender


def run_ranks(settings: Settings) -> int:
    """Run one trainer process per rank on this machine until all have ended.

    In a colocated run all ranks hold the device, so it is free only once the last rank has ended.

    Returns:
        The exit code.
    """
    if settings.colocated.enabled:
        DeviceLock(settings.run_dir).allow_children()
    return launch(torchrun(settings.trainer_ranks, "services.trainer"))[0]


def launch(command: Sequence[str]) -> tuple[int, bool]:
    """Run torchrun in this process.

    Args:
        command: torchrun's command line from `trainer.ranks.launch`.

    Returns:
        The exit code, which torchrun itself does not pass on, and whether a signal requested the stop. After
        a signal rank 0 has drained.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    os.environ.update(ONE_THREAD | os.environ)
    try:
        main(command[3:])
    except ChildFailedError as failed:
        return exit_code({failure.exitcode for failure in failed.failures.values()}), False
    except SignalException:
        return 0, True
    return 0, False


def exit_code(codes: Collection[int]) -> int:
    """Return one exit code for all ranks; after a signal it is above 128, as in a shell."""
    if known := next((code for code in (EXIT_SETTINGS, EXIT_UNAVAILABLE) if code in codes), 0):
        return known
    return FIRST_SIGNAL_CODE - min(codes) if min(codes) < 0 else EXIT_FAILED


def follow_rank_0(rank: int) -> None:
    """Run a rank other than 0: load its part of the models, then execute rank 0's commands.

    Stop signals are ignored. Rank 0 decides when the ranks end, because no rank may leave during a step.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    try:
        configure_logging(f"trainer.{rank}")
        settings = load_settings()
        if follower := build_follower(settings, rank):
            follower.follow()
            return
    except TetherError as error:  # rank 0 loads other models and may not raise this error
        exit_with(error, "tether trainer")
    await_device(settings)
    models = build_models(settings)
    sender = make_sender(
        settings.weights,
        models.policy,
        settings.engine.dtype,
        run=settings.run.name,
        run_dir=settings.run_dir,
        rank=rank,
        curve_dir=settings.bus.curve_dir,
    )
    executor = Executor(models, sender)
    executor.follow()
    if sender is not None:
        sender.close()
    executor.close()
