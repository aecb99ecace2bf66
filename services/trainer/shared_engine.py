"""Coordinates the trainer with the engine whose live weights it computes with (transport `shared`).

The engine copies its weights from the trainer's masters, so access to the masters alternates. From the
publication of a version until the engine serves it, the trainer does not compute, write to its masters or
end. From the beginning of a step until the next publication, the masters are marked invalid and no engine
reads them as a version. Meanwhile decoding and training only read the live weights. Trainer and engine are
one failure unit: the trainer ends with its engine, and its successor waits for the next engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from protocol.device.shared_layout import DESCRIPTION_KEY
from protocol.device.shared_tensors import ProcessIdentity, owner_of
from protocol.errors import TetherError, WeightError
from protocol.messages import WeightManifest
from protocol.topics import Role
from services.runtime.process import Process
from trainer.weights.shared import SharedSender
from trainer.weights.shared_parts import SharedPartSender

log = logging.getLogger("tether.sharing")

POLL_S = (0.003, 0.05)
"""First and longest wait between two reads of the registry while the engine is not ready, seconds."""
CHECK_S = 0.2
"""Seconds between two checks that the engine is alive."""

AnySharedSender = SharedSender | SharedPartSender
Attach = Callable[[Path], Awaitable[object]]
"""Attaches the backend to the tensors that a file describes."""


class SharedEngine:
    """The engine whose weights the trainer computes with."""

    def __init__(self, process: Process, sender: AnySharedSender | None, timeout_s: float) -> None:
        """Start without an engine.

        Args:
            process: provides registry and ledger.
            sender: publishes the masters; None if only adapters are trained, so the base weights never
                change.
            timeout_s: seconds for an engine to serve a version.
        """
        self._process = process
        self._sender = sender
        self._timeout_s = timeout_s
        self._engine = ""
        """Incarnation of the attached engine; empty before the first."""
        self._owner: ProcessIdentity | None = None
        """Process that owns the memory of the engine's weights."""

    def invalidate(self) -> None:
        """Withdraw the published version, before the masters are written to."""
        if self._sender is not None:
            self._sender.invalidate()

    async def ready(self, manifest: WeightManifest, attach: Attach) -> bool:
        """Wait until the engine serves a version and the backend is attached to it.

        The wait for an engine to start is unlimited.

        Args:
            manifest: manifest of the last published version.
            attach: called once, with the first engine that serves the version.

        Returns:
            False if the process is to stop instead.

        Raises:
            TetherError: the engine has ended, or has not served the version in time. The trainer must not
                continue.
        """
        delay, since = POLL_S[0], time.monotonic()
        with self._process.waiting("the engine to serve the weights") as set_detail:
            while not self._process.stop.is_set():
                self.check()
                described = await self._describing_engines()
                serving = await self._serving_engine(manifest, described)
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
                        f"engine {name} did not serve version {manifest.version} within "
                        f"{self._timeout_s:g} s "
                        "(weights.timeout_s); the trainer cannot compute with its weights"
                    )
                await self._process.stopped_within(delay)
                delay = min(delay * 1.5, POLL_S[1])
        return False

    async def wait_until_copied(self, manifest: WeightManifest) -> None:
        """Wait until the attached engine has copied a version, before the masters are freed.

        Also returns when the engine has left, after the timeout, or when the process is to stop.

        Args:
            manifest: manifest of the last published version.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._process.waiting("the engine to copy the last weights"):
            while self._sender is not None and time.monotonic() < deadline:
                described = await self._describing_engines()
                if self._engine not in described or await self._serving_engine(manifest, described):
                    return
                if await self._process.stopped_within(POLL_S[1]):
                    return

    def check(self) -> None:
        """Check that the attached engine is alive.

        Raises:
            TetherError: the engine has ended, so results computed with its memory since are invalid.
        """
        if self._owner is not None and not self._owner.is_alive():
            raise TetherError(
                f"engine {self._engine}, whose weights this trainer computes with, has ended: "
                "the trainer ends with it"
            )

    async def watch_loop(self) -> None:
        """Check every `CHECK_S` that the engine is alive, until cancelled.

        Raises:
            TetherError: the engine has ended.
        """
        while True:
            self.check()
            await asyncio.sleep(CHECK_S)

    async def _describing_engines(self) -> dict[str, str]:
        """Return the live engines that describe their tensors -> file with the description."""
        peers = await self._process.ledger.peers(Role.ROLLOUT)
        return {
            peer.incarnation: str(peer.info[DESCRIPTION_KEY])
            for peer in peers
            if _owner_is_alive(str(peer.info.get(DESCRIPTION_KEY, "")))
        }

    async def _serving_engine(self, manifest: WeightManifest, described: dict[str, str]) -> str:
        """Return the attached engine, or a candidate, if it serves the version; else an empty string."""
        served = (await self._process.ledger.status()).engines
        for engine in described:
            if self._engine in ("", engine) and served.get(engine) == (manifest.epoch, manifest.version):
                return engine
        return ""


def _owner_is_alive(description: str) -> bool:
    """Return whether the owner of a description is alive; its registration expires only later."""
    try:
        return bool(description) and owner_of(Path(description)).is_alive()
    except WeightError:
        return False
