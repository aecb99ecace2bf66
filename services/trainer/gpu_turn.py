"""Acquires and releases the shared GPU on the trainer's side."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import SettingsError, TetherError
from protocol.messages import Action, Control
from services.bus.broadcast import Broadcaster
from services.gpu_sharing.device_lock import DeviceLock, inherited_device
from services.gpu_sharing.memory_budget import check_budget
from services.gpu_sharing.turn import TURN, Turn, holders
from services.preflight.memory import expected_gb
from services.preflight.model import read_model
from services.runtime.process import Process
from services.settings.hub import fetch_model
from services.settings.sections import Settings
from trainer.memory.expected import GIB

log = logging.getLogger("tether.turns")

HOLDERS_REFRESH_S = 1.0
"""Seconds between updates of the holders' names while the trainer waits for the device."""
POLL_S = 0.01
"""Seconds between two attempts to lock the device."""


class TrainerGpuTurn:
    """The trainer's turn on the GPU. Rank 0 acquires and releases the device for all ranks."""

    def __init__(self, process: Process, device: DeviceLock) -> None:
        self.has_device = False
        """Whether the trainer has acquired the GPU and not released it."""
        self._process = process
        self._device = device
        self.broadcaster: Broadcaster | None = None
        """Announces a new turn to the engines; without a broadcaster they poll the registry."""

    async def acquire(self) -> None:
        """Acquire the device once all engines have released it.

        Raises:
            TetherError: an engine holds the device for longer than `colocated.wait_s`. To start anyway would
                exceed the device's memory.
        """
        await self._write(Turn.TRAINER)
        wait_s = self._process.settings.colocated.wait_s
        with self._process.waiting("engines to sleep") as set_detail:
            try:
                async with asyncio.timeout(wait_s):
                    refreshed_s = time.monotonic()
                    while not self._device.try_acquire(exclusive=True):
                        await asyncio.sleep(POLL_S)
                        if time.monotonic() - refreshed_s > HOLDERS_REFRESH_S:
                            set_detail(await holders(self._process, self._device))
                            refreshed_s = time.monotonic()
            except TimeoutError:
                names = await holders(self._process, self._device)
                raise TetherError(
                    f"{names} still held the device after {wait_s:g} s (colocated.wait_s): it does not "
                    "sleep, or not that fast; end it, `tether up` starts another one"
                ) from None
        self.has_device = True
        log.info("turn.trainer")

    async def release(self) -> None:
        """Release the device to the engines. The trainer must have freed all of its memory on the device."""
        log.info("turn.engines")
        self.has_device = False
        self._device.release()
        await self._write(Turn.ENGINES)

    async def _write(self, turn: Turn) -> None:
        self._process.info[TURN] = turn
        await self._process.register()
        if self.broadcaster is not None:
            self.broadcaster.publish(Control(action=Action.TURN))


@asynccontextmanager
async def first_turn(process: Process) -> AsyncIterator[TrainerGpuTurn | None]:
    """Hold the GPU lock of a colocated run within the block, which begins in the trainer's turn.

    Yields None if the run is not colocated.

    Raises:
        SettingsError: trainer and engines do not fit on the GPU together.
        TetherError: the engines have not released the GPU within `colocated.wait_s`.
    """
    settings = process.settings
    if not settings.colocated.enabled:
        yield None
        return
    await asyncio.to_thread(check_memory, settings)
    with closing(inherited_device(settings.run_dir) or DeviceLock(settings.run_dir)) as device:
        turn = TrainerGpuTurn(process, device)
        await turn.acquire()
        yield turn


def await_device(settings: Settings) -> None:
    """On a rank other than 0, wait until the trainer has the GPU. Blocks.

    Must run before any allocation on the device. Returns at once if the run is not colocated.

    Raises:
        TetherError: engines have not released the GPU within `colocated.wait_s`.
    """
    device = inherited_device(settings.run_dir) if settings.colocated.enabled else None
    end = time.monotonic() + settings.colocated.wait_s
    while device is not None and not device.try_acquire(exclusive=True):
        if time.monotonic() > end:
            raise TetherError(
                f"engines still held the device after {settings.colocated.wait_s:g} s (colocated.wait_s); "
                "rank 0 names them"
            )
        time.sleep(POLL_S)


def check_memory(settings: Settings) -> None:
    """Check that trainer and engines fit on their shared GPU; return at once without a GPU.

    Raises:
        SettingsError: trainer and engines do not fit, or the transport cannot connect processes on one GPU.
    """
    if not torch.cuda.is_available():
        return
    if settings.weights.transport == "nccl":
        raise SettingsError(
            "setting weights.transport: NCCL does not connect processes on one GPU; use ipc (or shm) in a "
            "colocated run"
        )
    ranks = settings.services.rollout_workers * settings.engine.tensor_parallel_size
    shapes = checkpoint_shapes(fetch_model(settings))
    check_budget(
        total_gb=torch.cuda.mem_get_info()[1] / GIB,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        workers=math.ceil(ranks / settings.parallel.world_size),
        engine=settings.engine,
        trainer=settings.trainer,
        parallel=settings.parallel,
        algorithm=settings.algorithm,
        weights=settings.weights,
        adapters=bool(settings.lora.rank),
        expected_gb=expected_gb(settings, read_model(settings)),
    )
