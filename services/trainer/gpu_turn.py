"""Takes and leaves the shared GPU on the trainer's side."""

import asyncio
import logging
import time

from protocol.errors import TetherError
from protocol.messages import Action, Control
from services.bus.broadcast import Broadcaster
from services.gpu_sharing.device_lock import DeviceLock
from services.gpu_sharing.turn import TURN, Turn, holders
from services.runtime.process import Process

log = logging.getLogger("tether.turns")

LOOK_S = 1.0
"""Seconds after which a wait for the device shows again who holds it."""
POLL_S = 0.01
"""Seconds between two attempts to lock the device."""


class TrainerGpuTurn:
    """The trainer's side."""

    def __init__(self, process: Process, device: DeviceLock) -> None:
        self.mine = False
        """Whether it has begun and not ended."""
        self._process = process
        self._device = device
        self.caster: Broadcaster | None = None
        """Tells engines to look at once, when there is one."""

    async def acquire(self) -> None:
        """Take the device when all engines have left it.

        Raises:
            TetherError: one has not within `colocated.wait_s`; to begin all the same would run the device
                out of memory.
        """
        await self._write(Turn.TRAINER)
        wait_s = self._process.settings.colocated.wait_s
        with self._process.waiting("engines to sleep") as set_detail:
            try:
                async with asyncio.timeout(wait_s):
                    looked = time.monotonic()
                    while not self._device.try_acquire(exclusive=True):
                        await asyncio.sleep(POLL_S)
                        if time.monotonic() - looked > LOOK_S:
                            set_detail(await holders(self._process, self._device))
                            looked = time.monotonic()
            except TimeoutError:
                names = await holders(self._process, self._device)
                raise TetherError(
                    f"{names} still held the device after {wait_s:g} s (colocated.wait_s): it does not sleep, or not that fast; end it, "
                    "`tether up` starts another one"
                ) from None
        self.mine = True
        log.info("turn.trainer")

    async def release(self) -> None:
        """Leave the device to the engines. Nothing of the trainer may be on it any more."""
        log.info("turn.engines")
        self.mine = False
        self._device.release()
        await self._write(Turn.ENGINES)

    async def _write(self, turn: Turn) -> None:
        self._process.info[TURN] = turn
        await self._process.register()
        if self.caster is not None:
            self.caster.publish(Control(action=Action.TURN))
