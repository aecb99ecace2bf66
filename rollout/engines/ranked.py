"""What engines have in common whose model lives in processes of its own: an update is the ranks' answers turned into one state.

An engine says how its ranks are called (`_call`) and what happens around a commit (`_commit`).
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from protocol.errors import PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Engine, EngineConfig, Served
from rollout.engines.rank_updates import RankUpdates

CALL_TIMEOUT_S = 60.0
"""For one answer of all ranks; a step on a loaded CPU can take seconds."""


class RankedEngine(Engine):
    """Stage, commit and adopt on all ranks; requests are not submitted while weights change."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._name = incarnation
        self._served = Served()
        self._running: dict[str, str] = {}
        """Request id -> the id that the engine's own processes know."""
        self._changes = 0
        """Commits and renames begun: what was cached or submitted before one may be of other weights."""
        self._open = asyncio.Event()
        """Cleared while weights change: requests are not submitted then."""
        self._open.set()
        self._updating = asyncio.Lock()
        self._updates = RankUpdates(self._call, stage_timeout_s=config.stage_timeout_s, call_timeout_s=CALL_TIMEOUT_S)
        self._poisoned = ""

    @property
    def served(self) -> Served:
        return self._served

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        await self._updates.stage(manifest)

    async def commit(self, manifest: WeightManifest) -> float:
        await self.check()
        async with self._updating:
            self._open.clear()
            try:
                return await self._commit(manifest)
            finally:
                self._open.set()

    async def adopt(self, epoch: str, version: int) -> None:
        await self.check()
        async with self._updating:
            if self._served.version < 0:
                raise WeightError(f"{self._name} serves no version yet that could be renamed")
            self._open.clear()
            try:
                self._changes += 1
                await self._call("rename", version)
                self._served = Served(epoch, version, self._served.digest)
            finally:
                self._open.set()

    async def live_digest(self) -> int:
        """Digest of the live parameters, read between two steps; with one rank that of the manifest whose bytes they are."""
        return await self._updates.live_digest()

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, given between two steps. Raises EngineError if one does not answer."""

    @abstractmethod
    async def _commit(self, manifest: WeightManifest) -> float:
        """See `commit`; by way of `_apply`."""

    async def _apply(self, manifest: WeightManifest, afterwards: Callable[[], Awaitable[None]] | None = None) -> list[Any]:
        """Commit on all ranks and serve the version from now on. Returns the ranks' answers.

        Args:
            afterwards: what has to follow on the ranks before the version counts as served.

        Raises:
            WeightError: nothing changed.
            PoisonedError: live weights may be mixed; `check` says so from now on.
        """
        self._changes += 1
        try:
            ranks = await self._updates.commit(manifest)
            if afterwards is not None:
                await afterwards()
        except PoisonedError as error:
            self._poisoned = str(error)
            raise
        except WeightError:  # untouched
            raise
        except BaseException as error:  # no answer: nobody knows what was applied
            self._poisoned = f"the commit of version {manifest.version} did not end: {error!r}"
            raise PoisonedError(self._poisoned) from error
        self._served = Served(manifest.epoch, manifest.version, manifest.digest)
        return ranks
