"""Hears on the bus what the trainer announces to engines and what engines answer, as a further peer of both.

It changes nothing: it connects to the trainer's topic `weights` as an engine does, and registers an endpoint
of that topic, so that engines send it the answers that they send the trainer.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocol.errors import Unavailable
from protocol.ids import new_incarnation
from protocol.messages import WeightDraft, WeightFailed, WeightManifest, WeightStaged
from protocol.topics import WEIGHTS, Role
from services.bus.broadcast import Broadcaster, Listener
from services.bus.config import BusConfig
from services.ledger.interface import Peer
from services.ledger.redis.ledger import RedisLedger
from tests.trials.chaos.gpu_kills.layouts import Moment
from tests.trials.chaos.gpu_kills.moments import Announced, Staged

TTL_MS = 3_600_000
"""How long its endpoint stays registered, unless it is unregistered."""


def now_ms() -> float:
    return time.time() * 1e3


class Witness:
    """What was heard so far."""

    def __init__(self) -> None:
        self.announced: list[Announced] = []
        self.staged: list[Staged] = []
        self.failed: list[str] = []
        """Why engines could not stage or commit versions."""
        self._wanted: Callable[[Announced], bool] = lambda told: False
        self._heard: asyncio.Future[Announced] | None = None

    async def announcement(self, wanted: Callable[[Announced], bool]) -> Announced:
        """Wait for the next announcement that is wanted."""
        self._wanted, self._heard = wanted, asyncio.get_running_loop().create_future()
        try:
            return await self._heard
        finally:
            self._heard = None

    async def listen_loop(self, listener: Listener) -> None:
        """Note what the trainer announces, until cancelled."""
        while True:
            _, message = await listener.receive()
            if not isinstance(message, (WeightDraft, WeightManifest)):
                continue
            moment = Moment.DRAFT if isinstance(message, WeightDraft) else Moment.MANIFEST
            told = Announced(now_ms(), moment, message.epoch, message.version)
            if self._heard is not None and not self._heard.done() and self._wanted(told):
                self._heard.set_result(told)
            self.announced.append(told)

    async def answers_loop(self, broadcaster: Broadcaster) -> None:
        """Note what engines answer, until cancelled."""
        while True:
            _, message = await broadcaster.answers()
            if isinstance(message, WeightStaged):
                self.staged.append(
                    Staged(now_ms(), message.engine, message.epoch, message.version, message.digest)
                )
            elif isinstance(message, WeightFailed):
                self.failed.append(f"version {message.version}: {message.error}")


@asynccontextmanager
async def witnessing(ledger: RedisLedger, run: str, config: BusConfig) -> AsyncIterator[Witness]:
    """Be a peer of a run within the block."""
    witness, incarnation = Witness(), new_incarnation("witness")
    listener = Listener(
        WEIGHTS, run=run, incarnation=incarnation, role=Role.MONITOR, config=config,
        discover=lambda: _trainers(ledger, incarnation),
    )  # fmt: skip
    async with (
        Broadcaster(WEIGHTS, run=run, incarnation=incarnation, config=config) as broadcaster,
        listener,
        asyncio.TaskGroup() as tasks,
    ):
        info = {
            "name": "witness", "pid": os.getpid(), "host": socket.gethostname(), "started": time.time(),
            "endpoints": {WEIGHTS.name: broadcaster.endpoint},
        }  # fmt: skip
        await ledger.register(Peer(Role.MONITOR, incarnation, info), ttl_ms=TTL_MS)
        loops = [
            tasks.create_task(witness.listen_loop(listener), name="witness.listen"),
            tasks.create_task(witness.answers_loop(broadcaster), name="witness.answers"),
        ]
        try:
            yield witness
        finally:
            for task in loops:
                task.cancel()
            with contextlib.suppress(Unavailable):
                await ledger.unregister(incarnation)


async def _trainers(ledger: RedisLedger, itself: str) -> dict[str, str]:
    return {name: endpoint for name, endpoint in (await ledger.endpoints(WEIGHTS.name)).items()
            if name != itself}  # fmt: skip
