"""Trainer and engines that share a GPU use it by turns: who is to have it, how the other is asked to leave, and how both know.

The registry says whose turn it is, and a message on the bus only that it is worth a look; neither keeps anybody out. That does the lock of
the device (`device.py`), which whoever is on it holds: the trainer begins when all engines have left it, an engine takes it in the engines'
turn when the trainer has. So both can never have it, whatever is late, lost or away.

Where no trainer is registered, it has died, or the ledger was away: engines that sleep sleep on until its successor has made its first
turn, those that generate go on.
"""

import asyncio
import logging
import time
from contextlib import suppress
from enum import StrEnum

from protocol.errors import TetherError
from protocol.messages import Action, Control
from protocol.topics import Role
from services.bus.broadcast import Broadcaster
from services.device import Device
from services.process import Process
from services.updating import WeightUpdater

log = logging.getLogger("tether.turns")

TURN, HOLDS = "turn", "holds_device"
"""What trainer and engine write into the registry; HOLDS is for people, and for names in errors."""
LOOK_S = 1.0
"""How often an engine looks without being told to, and the trainer who it waits for."""
POLL_S = 0.01


class Turn(StrEnum):
    """Who uses the device."""

    TRAINER = "trainer"
    ENGINES = "engines"


class TrainerTurn:
    """The trainer's side."""

    def __init__(self, process: Process, device: Device) -> None:
        self.mine = False
        """Whether it has begun and not ended."""
        self._process = process
        self._device = device
        self.caster: Broadcaster | None = None
        """Tells engines to look at once, when there is one."""

    async def begin(self) -> None:
        """Take the device when all engines have left it.

        Raises:
            TetherError: one has not within `colocated.wait_s`; to begin all the same would run the device out of memory.
        """
        await self._write(Turn.TRAINER)
        wait_s = self._process.settings.colocated.wait_s
        with self._process.waiting("engines to sleep") as because:
            try:
                async with asyncio.timeout(wait_s):
                    looked = time.monotonic()
                    while not self._device.take(alone=True):
                        await asyncio.sleep(POLL_S)
                        if time.monotonic() - looked > LOOK_S:
                            because(await holders(self._process, self._device))
                            looked = time.monotonic()
            except TimeoutError:
                names = await holders(self._process, self._device)
                raise TetherError(
                    f"{names} still held the device after {wait_s:g} s (colocated.wait_s): it does not sleep, or not that fast; end it, "
                    "`tether up` starts another one"
                ) from None
        self.mine = True
        log.info("turn.trainer")

    async def end(self) -> None:
        """Leave the device to the engines. Nothing of the trainer may be on it any more."""
        log.info("turn.engines")
        self.mine = False
        self._device.leave()
        await self._write(Turn.ENGINES)

    async def _write(self, turn: Turn) -> None:
        self._process.info[TURN] = turn
        await self._process.register()
        if self.caster is not None:
            self.caster.publish(Control(action=Action.TURN))


class EngineTurn:
    """A rollout worker's side."""

    def __init__(self, process: Process, device: Device) -> None:
        self._process = process
        self._device = device
        self._look = asyncio.Event()

    def look(self) -> None:
        """Something may have changed."""
        self._look.set()

    async def take(self) -> bool:
        """Wait until the engines may use the device, and hold it; false if the process is to stop instead.

        Raises:
            TetherError: it is the engines' turn, and for `colocated.wait_s` somebody held the device all the same.
        """
        barred: float | None = None
        with self._process.waiting("the trainer's turn to end"):
            while not self._process.stop.is_set():
                if await self._turn() is not Turn.ENGINES:
                    barred = None
                elif self._device.take(alone=False):
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
            await self.leave()
            if not await self.take():
                return
            await updater.wake()

    async def leave(self) -> None:
        """Hold the device no longer. Nothing of the engine may be on it any more."""
        log.info("device.left engine=%s", self._process.incarnation)
        self._device.leave()
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
            raise TetherError(f"{names} still held the device after {wait_s:g} s (colocated.wait_s), in the engines' turn: end it")

    async def _say(self, holds: bool) -> None:
        self._process.info[HOLDS] = holds
        await self._process.register()

    async def _looked(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._look.wait()
        self._look.clear()


async def holders(process: Process, device: Device) -> str:
    """Who holds the device, for people: what the registry says of it, and what else this host shows."""
    seen = await asyncio.to_thread(device.holders)
    known: dict[str, int] = {}
    with suppress(TetherError, TimeoutError):  # the ledger may be away
        async with asyncio.timeout(LOOK_S):
            peers = [*await process.ledger.peers(Role.ROLLOUT), *await process.ledger.peers(Role.TRAINER)]
        pids = {peer.incarnation: int(peer.info.get("pid", 0)) for peer in peers if peer.incarnation != process.incarnation}
        known = {name: pids[name] for name in pids if pids[name] in seen}
        known |= {peer.incarnation: pids[peer.incarnation] for peer in peers if peer.info.get(HOLDS)}
    others = [f"{name} (pid {pid})" for pid, name in seen.items() if pid not in known.values()]
    return ", ".join([*known, *others]) or "a process that cannot be seen from here"
