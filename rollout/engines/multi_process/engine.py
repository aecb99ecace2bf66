"""What engines have in common whose model lives in processes of its own: an update is the ranks' answers
turned into one state.

An engine says how its ranks are called (`_call`) and what happens around a commit (`_commit`).
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from protocol.errors import EngineError, PoisonedError, Unsupported, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Completion, Engine, EngineConfig, Served
from rollout.staging.ranks import AllRanksStaging

CALL_TIMEOUT_S = 60.0
"""For one answer of all ranks; a step on a loaded CPU can take seconds."""

ABORTED = Completion((), (), (), "abort")
"""Of a request that was never submitted."""


class MultiProcessEngine(Engine):
    """Stage, commit, adopt, sleep and wake on all ranks; requests are not submitted while weights change or
    are not there."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._name = incarnation
        self._served = Served()
        self._running: dict[str, str] = {}
        """Request id -> the id that the engine's own processes know."""
        self._changes = 0
        """Commits and renames begun: what was cached or submitted before one may be of other weights."""
        self._accepting = True
        """False while weights change or are not there: requests are not submitted then, but wait."""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Request id -> resolved when it may look again."""
        self._aborted: set[str] = set()
        """Of those that wait."""
        self._asleep = False
        self._weights_released = False
        """It has slept, and no version was committed since: there are no weights to generate with."""
        self._updating = asyncio.Lock()
        self._is_committing = False
        self._updates = AllRanksStaging(
            self._call,
            self._call_anytime,
            stage_timeout_s=config.stage_timeout_s,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        self._poisoned = ""

    @property
    def served(self) -> Served:
        return self._served

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        if self._asleep:
            raise WeightError(
                f"version {manifest.version}: the engine sleeps, there is no memory to stage in"
            )
        if self._is_committing:  # the ranks hear of both by different ways
            raise WeightError(f"version {manifest.version}: another version is being committed")
        await self._updates.stage(manifest)

    async def commit(self, manifest: WeightManifest) -> float:
        await self.check()
        if self._updates.is_staging:
            raise WeightError(f"version {manifest.version} is not staged: one is being staged")
        self._is_committing = True
        try:
            async with self._updating:
                self._accepting = False
                try:
                    return await self._commit(manifest)
                finally:
                    self._reopen()
        finally:
            self._is_committing = False

    async def adopt(self, epoch: str, version: int) -> None:
        await self.check()
        async with self._updating:
            if self._served.version < 0:
                raise WeightError(f"{self._name} serves no version yet that could be renamed")
            self._accepting = False
            try:
                self._changes += 1
                await self._call("rename", version)
                self._served = Served(epoch, version, self._served.digest)
            finally:
                self._reopen()

    async def sleep(self) -> None:
        await self.check()
        if not self.capabilities.sleep:
            raise Unsupported(
                f"engine {self._name} cannot sleep: it was started without engine.enable_sleep_mode"
            )
        async with self._updating:
            if self._asleep:
                return
            if self._updates.is_staging:
                raise WeightError("a version is being staged: the engine cannot sleep now")
            self._asleep = self._weights_released = True
            self._accepting = False
            self._served = Served()
            await self._poison_unless_done("sleep", self._give_back)

    async def wake(self) -> None:
        await self.check()
        if not self.capabilities.sleep:
            raise Unsupported(f"engine {self._name} cannot sleep, so there is nothing to wake")
        async with self._updating:
            if self._asleep:
                await self._poison_unless_done("wake", self._updates.wake)
                self._asleep = False

    async def live_digest(self) -> int:
        """Digest of the live parameters, read between two steps; with one rank that of the manifest whose
        bytes they are."""
        if self._weights_released:
            raise EngineError(f"engine {self._name} has slept: it holds no weights before the next commit")
        return await self._updates.live_digest()

    async def _admitted(self, request_id: str) -> bool:
        """Wait until requests may be submitted; false if this one was aborted meanwhile."""
        try:
            while not self._accepting and request_id not in self._aborted:
                self._waiting[request_id] = asyncio.get_running_loop().create_future()
                await self._waiting[request_id]
                await self.check()
            return request_id not in self._aborted
        finally:
            self._waiting.pop(request_id, None)
            self._aborted.discard(request_id)

    def _abort_waiting(self, request_ids: Iterable[str]) -> None:
        self._aborted |= self._waiting.keys() & set(request_ids)
        self._wake_waiting()

    def _reopen(self) -> None:
        """The weights have changed, or stayed as they were: requests are submitted again, if there are
        weights."""
        self._accepting = not self._weights_released
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, given between two steps. Raises EngineError if one does not answer."""

    async def _call_anytime(self, method: str, *arguments: Any) -> list[Any]:
        """The same for what a rank may be asked at any time: to stage, how that goes, to end it."""
        return await self._call(method, *arguments)

    @abstractmethod
    async def _commit(self, manifest: WeightManifest) -> float:
        """See `commit`; by way of `_apply`."""

    async def _give_back(self) -> None:
        """Put running requests back, with their tokens, and give all memory back; no step is made before the
        next commit."""
        await self._updates.sleep()

    async def _poison_unless_done(self, what: str, change: Callable[[], Awaitable[None]]) -> None:
        """Something that leaves the engine useless unless it ends well."""
        ended = False
        try:
            await change()
            ended = True
        except EngineError as error:
            self._poisoned = f"{what}: {error}"
            raise
        finally:
            self._poisoned = self._poisoned or ("" if ended else f"{what} did not end")

    async def _apply(
        self, manifest: WeightManifest, afterwards: Callable[[], Awaitable[None]] | None = None
    ) -> list[Any]:
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
        self._weights_released = False
        return ranks
