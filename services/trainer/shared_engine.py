"""Transport `shared`: the trainer computes with the engine's live weights, which the engine fills from the
trainer's masters.

So the two take turns with them. From the moment a version is published until the engine serves it, the
trainer neither computes nor writes to its masters. From the beginning of a step until the next version is
published, no engine can take the masters for a version; what it decodes and what the trainer computes
meanwhile only reads the live weights. Trainer and engine are one failure unit: the trainer ends with its
engine, and its successor waits for the next one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from protocol.device.shared_layout import DESCRIBED
from protocol.device.shared_tensors import ProcessIdentity, owner_of
from protocol.errors import TetherError, WeightError
from protocol.messages import WeightManifest
from protocol.topics import Role
from services.runtime.process import Process
from trainer.weights.shared import SharedSender

log = logging.getLogger("tether.sharing")

POLL_S = (0.003, 0.05)
LOOK_S = 0.2

Attach = Callable[[Path], Awaitable[object]]
"""Has the backend compute with the tensors of a description."""


class SharedEngine:
    """The engine that the trainer computes with."""

    def __init__(self, process: Process, sender: SharedSender, timeout_s: float) -> None:
        """`timeout_s`: how long an engine may take to serve a version."""
        self._process = process
        self._sender = sender
        self._timeout_s = timeout_s
        self._engine = ""
        """Incarnation, once attached to."""
        self._owner: ProcessIdentity | None = None
        """The process that its weights are memory of."""

    def invalidate(self) -> None:
        """The masters are about to be written to."""
        self._sender.invalidate()

    async def ready(self, manifest: WeightManifest, attach: Attach) -> bool:
        """Wait until the engine serves what was published last, and is attached to; false if the process is
        to stop instead.

        For an engine to come it waits as long as it takes.

        Raises:
            TetherError: the engine has gone, or has not served the version in time; the trainer must not
                go on.
        """
        delay, since = POLL_S[0], time.monotonic()
        with self._process.waiting("the engine to serve the weights") as set_detail:
            while not self._process.stop.is_set():
                self.check()
                described = await self._described()
                serving = await self._serving(manifest, described)
                if serving:
                    if not self._engine:
                        path = Path(described[serving])
                        owner = owner_of(path)
                        await attach(path)
                        self._engine, self._owner = serving, owner
                        log.info("weights.attached engine=%s version=%d", serving, manifest.version)
                    return True
                if not described and not self._engine:
                    set_detail("no engine has started")
                    since = time.monotonic()
                elif time.monotonic() - since > self._timeout_s:
                    name = self._engine or ", ".join(described)
                    raise TetherError(
                        f"engine {name} did not serve version {manifest.version} within {self._timeout_s:g} s "
                        "(weights.timeout_s); the trainer cannot compute with its weights before"
                    )
                await self._process.stopped_within(delay)
                delay = min(delay * 1.5, POLL_S[1])
        return False

    def check(self) -> None:
        """Raises TetherError if the engine that is attached to has ended: what was computed with its memory
        since is worth nothing."""
        if self._owner is not None and not self._owner.is_alive():
            raise TetherError(
                f"engine {self._engine}, whose weights this trainer computes with, has gone: it ends with it"
            )

    async def watch_loop(self) -> None:
        """Look whether the engine lives, until cancelled; else only the next step would show that it does
        not.

        Raises:
            TetherError: it has gone.
        """
        while True:
            self.check()
            await asyncio.sleep(LOOK_S)

    async def _described(self) -> dict[str, str]:
        """Engines that have described their tensors and live -> the file."""
        peers = await self._process.ledger.peers(Role.ROLLOUT)
        return {
            peer.incarnation: str(peer.info[DESCRIBED])
            for peer in peers
            if _lives(str(peer.info.get(DESCRIBED, "")))
        }

    async def _serving(self, manifest: WeightManifest, described: dict[str, str]) -> str:
        """The engine that is attached to, or one to attach to, if it serves the version; else empty."""
        served = (await self._process.ledger.status()).engines
        for engine in described:
            if self._engine in ("", engine) and served.get(engine) == (manifest.epoch, manifest.version):
                return engine
        return ""


def _lives(description: str) -> bool:
    """Whether the owner of a description does; a registration outlives it for a while."""
    try:
        return bool(description) and owner_of(Path(description)).is_alive()
    except WeightError:
        return False
