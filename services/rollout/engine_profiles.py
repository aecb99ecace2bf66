"""Has torch.profiler watch an engine under the versions of `engine.profile_versions`, a trace for each."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from protocol.errors import EngineError
from rollout.engines.base import Engine
from services.runtime.process import Process

log = logging.getLogger("tether.rollout")

END_S = 30.0
"""How long the trace of the last version may take when the worker ends."""


class EngineProfiles:
    """Begins and ends the profiles of one engine; run `follow_loop` as a task."""

    def __init__(self, process: Process, engine: Engine, then: Callable[[], None]) -> None:
        """Watch no version yet.

        Args:
            process: the worker; its settings say which versions, and how many decode steps of each.
            engine: to watch.
            then: called after each `notify`.
        """
        config = process.settings.engine
        self._engine = engine
        self._then = then
        self._versions = range(0)
        if config.profile_versions:
            self._versions = range(config.profile_versions[0], config.profile_versions[-1] + 1)
        self._steps = config.profile_decode_steps
        self._directory = process.settings.run_dir / "profiles"
        self._name = process.incarnation
        self._watched = -1
        """Version of the profile that is on, or was begun last; below 0: none is on."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Notice that the engine may serve another version."""
        self._changed.set()
        self._then()

    async def follow_loop(self) -> None:
        """Begin a profile at each version that is to be watched, and end it at the next, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            version = self._engine.served.version
            if version != self._watched and (version in self._versions or self._watched >= 0):
                await self._watch(version if version in self._versions else -1)

    async def end(self) -> None:
        """Write the profile that is on, if one is, before the engine is closed."""
        if self._watched >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._watch(-1)

    async def _watch(self, version: int) -> None:
        """End the profile that is on, and begin one of `version`, unless it is below 0.

        A profile that fails is logged: the run does without.
        """
        self._watched = version
        file = self._directory / f"version_{version:08d}.{self._name}"
        try:
            await self._engine.profile(file, 0 if version < 0 else self._steps)
        except EngineError as error:
            log.warning("engine.profile_failed version=%d error=%s", version, error)
