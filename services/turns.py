"""Trainer and engines that share a GPU use it by turns: who may, how the other is asked to leave, and how both know.

The registry is the truth; a message on the bus only says that it is worth a look. The trainer writes down whose turn it is, an engine
whether it holds memory on the device. Each writes first and reads then: the trainer begins when it reads that no engine holds the device
after it has written that the turn is its own; an engine takes the device when it still reads that the turn is the engines' after it has
written that it holds it. So both can never have it, whatever is late, and the trainer comes first.

Where no trainer is registered, it has died: engines that sleep sleep on until its successor has made its first turn, those that
generate go on. An engine that has died holds nothing once its registration has run out.
"""

import asyncio
import logging
from contextlib import suppress
from enum import StrEnum

from protocol.errors import TetherError
from protocol.messages import Action, Control
from protocol.topics import Role
from services.bus.broadcast import Broadcaster
from services.process import Process
from services.updating import WeightUpdater

log = logging.getLogger("tether.turns")

TURN, HOLDS = "turn", "holds_device"
"""What trainer and engine write into the registry."""
LOOK_S = 1.0
"""How often an engine looks without being told to."""
POLL_S = 0.01


class Turn(StrEnum):
    """Who uses the device."""

    TRAINER = "trainer"
    ENGINES = "engines"


class TrainerTurn:
    """The trainer's side."""

    def __init__(self, process: Process, wait_s: float) -> None:
        self.mine = False
        """Whether it has begun and not ended."""
        self._process = process
        self._wait_s = wait_s
        self.caster: Broadcaster | None = None
        """Tells engines to look at once, when there is one."""

    async def begin(self) -> None:
        """Take the device when all engines have left it.

        Raises:
            TetherError: one has not within `wait_s`; to begin all the same would run the device out of memory.
        """
        await self._write(Turn.TRAINER)
        holders: list[str] = []
        with self._process.waiting("engines to sleep") as because:
            try:
                async with asyncio.timeout(self._wait_s):
                    while holders := await self._holders():
                        because(", ".join(holders))
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise TetherError(
                    f"{', '.join(holders)} still held the device after {self._wait_s:g} s (colocated.wait_s): it does not sleep, or not "
                    "that fast; end it, `tether up` starts another one"
                ) from None
        self.mine = True
        log.info("turn.trainer")

    async def end(self) -> None:
        """Leave the device to the engines. Nothing of the trainer may be on it any more."""
        log.info("turn.engines")
        self.mine = False
        await self._write(Turn.ENGINES)

    async def _write(self, turn: Turn) -> None:
        self._process.info[TURN] = turn
        await self._process.register()
        if self.caster is not None:
            self.caster.publish(Control(action=Action.TURN))

    async def _holders(self) -> list[str]:
        return [peer.incarnation for peer in await self._process.ledger.peers(Role.ROLLOUT) if peer.info.get(HOLDS)]


class EngineTurn:
    """A rollout worker's side."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._look = asyncio.Event()

    def look(self) -> None:
        """Something may have changed."""
        self._look.set()

    async def take(self) -> bool:
        """Wait until the engines may use the device, and hold it; false if the process is to stop instead."""
        with self._process.waiting("the trainer's turn to end"):
            while not self._process.stop.is_set():
                if await self._turn() is Turn.ENGINES:
                    await self._hold(True)
                    if await self._turn() is Turn.ENGINES:
                        log.info("device.held engine=%s", self._process.incarnation)
                        return True
                    await self._hold(False)
                await self._looked()
        return False

    async def turns_loop(self, updater: WeightUpdater) -> None:
        """Sleep and wake with the turns, until cancelled; begins with an engine that holds the device."""
        while True:
            while await self._turn() is not Turn.TRAINER:
                await self._looked()
            await updater.sleep()
            log.info("device.left engine=%s", self._process.incarnation)
            await self._hold(False)
            if not await self.take():
                return
            await updater.wake()

    async def _turn(self) -> Turn | None:
        """None: there is no trainer."""
        written = {peer.info.get(TURN) for peer in await self._process.ledger.peers(Role.TRAINER)}
        if not written:
            return None
        return Turn.ENGINES if written == {Turn.ENGINES} else Turn.TRAINER

    async def _hold(self, holds: bool) -> None:
        self._process.info[HOLDS] = holds
        await self._process.register()

    async def _looked(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._look.wait()
        self._look.clear()
