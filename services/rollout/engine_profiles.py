"""Profiles an engine with torch.profiler, one trace for each version in `engine.profile_versions`."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from protocol.errors import EngineError
from rollout.engines.base import Engine
from services.runtime.process import Process

log = logging.getLogger("tether.rollout")

END_S = 30.0
"""Seconds to write the trace of the last version when the worker ends."""


class EngineProfiles:
    """Starts and stops the profiles of one engine; run `follow_loop` as a task."""

    def __init__(self, process: Process, engine: Engine, then: Callable[[], None]) -> None:
        """Start without a profile.

        Args:
            process: the worker; its settings name the versions to profile and the decode steps per profile.
            engine: engine to profile.
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
        """Version of the running profile; negative while no profile runs."""
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Report that the engine may serve another version."""
        self._changed.set()
        self._then()

    async def follow_loop(self) -> None:
        """Start a profile at each version to be profiled and stop it at the next version, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            version = self._engine.served.version
            if version != self._watched and (version in self._versions or self._watched >= 0):
                await self._watch(version if version in self._versions else -1)

    async def end(self) -> None:
        """Stop a running profile and write its trace, before the engine is closed."""
        if self._watched >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._watch(-1)

    async def _watch(self, version: int) -> None:
        """Stop the running profile, and start one for `version` unless `version` is negative.

        A profile that fails is logged and skipped.
        """
        self._watched = version
        file = self._directory / f"version_{version:08d}.{self._name}"
        try:
            await self._engine.profile(file, 0 if version < 0 else self._steps)
        except EngineError as error:
            log.warning("engine.profile_failed version=%d error=%s", version, error)
