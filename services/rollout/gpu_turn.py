"""Takes and leaves the shared GPU on a rollout worker's side; its engine sleeps and wakes with the turns."""

import asyncio
import time
from contextlib import suppress

from protocol.errors import TetherError
from protocol.topics import Role
from services.gpu_sharing.device_lock import DeviceLock
from services.gpu_sharing.turn import HOLDS, LOOK_S, TURN, Turn, holders, log
from services.rollout.weight_updater import WeightUpdater
from services.runtime.process import Process


class EngineGpuTurn:
    """A rollout worker's side."""

    def __init__(self, process: Process, device: DeviceLock) -> None:
        self._process = process
        self._device = device
        self._look = asyncio.Event()

    def notify(self) -> None:
        """Something may have changed."""
        self._look.set()

    async def acquire(self) -> bool:
        """Wait until the engines may use the device, and hold it; false if the process is to stop instead.

        Raises:
            TetherError: it is the engines' turn, and for `colocated.wait_s` somebody held the device all
                the same.
        """
        barred: float | None = None
        with self._process.waiting("the trainer's turn to end"):
            while not self._process.stop.is_set():
                if await self._turn() is not Turn.ENGINES:
                    barred = None
                elif self._device.try_acquire(exclusive=False):
                    log.info("device.held engine=%s", self._process.incarnation)
                    await self._say(True)
                    return True
                else:
                    barred = barred or time.monotonic()
                    await self._bound(barred)
                await self._looked()
        return False

    async def turns_loop(self, updater: WeightUpdater) -> None:
        """Sleep and wake with the turns, until cancelled; begins with an engine that holds the device."""
        while True:
            while await self._turn() is not Turn.TRAINER:
                await self._looked()
            await updater.sleep()
            await self.release()
            if not await self.acquire():
                return
            await updater.wake()

    async def release(self) -> None:
        """Hold the device no longer. Nothing of the engine may be on it any more."""
        log.info("device.left engine=%s", self._process.incarnation)
        self._device.release()
        await self._say(False)

    async def _turn(self) -> Turn | None:
        """None: there is no trainer."""
        written = {peer.info.get(TURN) for peer in await self._process.ledger.peers(Role.TRAINER)}
        if not written:
            return None
        return Turn.ENGINES if written == {Turn.ENGINES} else Turn.TRAINER

    async def _bound(self, since: float) -> None:
        wait_s = self._process.settings.colocated.wait_s
        if time.monotonic() - since > wait_s:
            names = await holders(self._process, self._device)
            raise TetherError(
                f"{names} still held the device after {wait_s:g} s (colocated.wait_s), in the engines' turn: end it"
            )

    async def _say(self, holds: bool) -> None:
        self._process.info[HOLDS] = holds
        await self._process.register()

    async def _looked(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._look.wait()
        self._look.clear()
