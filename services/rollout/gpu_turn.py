"""Acquires and releases the shared GPU for an engine, which sleeps during the trainer's turns."""

import asyncio
import logging
import time

from protocol.errors import TetherError
from protocol.topics import Role
from services.gpu_sharing.device_lock import DeviceLock
from services.gpu_sharing.turn import HOLDS, TURN, Turn, holders
from services.observability.busy import BusyMeter
from services.rollout.weight_updater import WeightUpdater
from services.runtime.event_loop import is_set_within
from services.runtime.process import Process

log = logging.getLogger("tether.turns")

POLL_S = 1.0
"""Seconds between two reads of the registry if no message announces a new turn."""


class EngineGpuTurn:
    """Time-slicing of the GPU with the trainer, on the side of one engine."""

    def __init__(self, process: Process, device: DeviceLock) -> None:
        self._process = process
        self._device = device
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Read the registry at once, because the turn may have changed."""
        self._notified.set()

    async def acquire(self) -> bool:
        """Wait for the engines' turn and acquire the device; return False if the process is to stop instead.

        Raises:
            TetherError: another process held the device for `colocated.wait_s` during the engines' turn.
        """
        barred_since: float | None = None
        with self._process.waiting("the trainer's turn to end"):
            while not self._process.stop.is_set():
                if await self._turn() is not Turn.ENGINES:
                    barred_since = None
                elif self._device.try_acquire(exclusive=False):
                    log.info("device.held engine=%s", self._process.incarnation)
                    await self._register_holding(True)
                    return True
                else:
                    barred_since = barred_since or time.monotonic()
                    await self._check_barred(barred_since)
                await self._notified_or_polled()
        return False

    async def turns_loop(self, updater: WeightUpdater, meter: BusyMeter) -> None:
        """Put the engine to sleep and wake it with the turns, until cancelled.

        The engine must hold the device at the start. `meter` counts no time while the engine sleeps.
        """
        while True:
            while await self._turn() is not Turn.TRAINER:
                await self._notified_or_polled()
            await updater.sleep()
            meter.sleep()
            await self.release()
            if not await self.acquire():
                return
            await updater.wake()
            meter.wake()

    async def release(self) -> None:
        """Release the device. The engine must have freed all of its memory on the device."""
        log.info("device.left engine=%s", self._process.incarnation)
        self._device.release()
        await self._register_holding(False)

    async def _turn(self) -> Turn | None:
        """Return the turn that the registry names; None if no trainer is registered."""
        written = {peer.info.get(TURN) for peer in await self._process.ledger.peers(Role.TRAINER)}
        if not written:
            return None
        return Turn.ENGINES if written == {Turn.ENGINES} else Turn.TRAINER

    async def _check_barred(self, since: float) -> None:
        wait_s = self._process.settings.colocated.wait_s
        if time.monotonic() - since > wait_s:
            names = await holders(self._process, self._device)
            raise TetherError(
                f"{names} still held the device after {wait_s:g} s (colocated.wait_s), "
                "in the engines' turn: end it"
            )

    async def _register_holding(self, holds: bool) -> None:
        self._process.info[HOLDS] = holds
        await self._process.register()

    async def _notified_or_polled(self) -> None:
        await is_set_within(self._notified, POLL_S)
        self._notified.clear()
