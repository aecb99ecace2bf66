"""Updates weights on all ranks and admits requests, for engines whose model runs in other processes.

Subclasses start the processes, submit requests (`_complete`), and implement commit and sleep with
`_committing` and `_release_memory`.
"""

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError, Unsupported, WeightError
from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig
from rollout.engines.base import Capabilities, Completion, Engine, EngineConfig, Occupancy, Request, Served
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S
from rollout.engines.multi_process.routed_experts import Mixture
from rollout.engines.requests import check_request
from rollout.engines.weight_state import WeightState
from rollout.staging.ranks import AllRanksStaging, Call

ABORTED = Completion((), (), (), "abort")
"""Completion of a request that was aborted before submission."""


class RequestGate:
    """Gate that holds requests back while weights change or are released."""

    def __init__(self, weights: WeightState, check: Callable[[], Awaitable[None]]) -> None:
        """Create a gate.

        Args:
            weights: decides whether requests are admitted.
            check: raises EngineError if the engine is dead, poisoned or closed.
        """
        self._weights = weights
        self._check = check
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Request id -> future that is resolved when the request may retry."""
        self._aborted: set[str] = set()
        """Waiting requests that were aborted."""

    async def admitted(self, request_id: str) -> bool:
        """Wait until requests may be submitted; return False if this request was aborted first.

        Raises:
            EngineError: the engine ended while the request waited.
        """
        try:
            while not self._weights.admits_requests and request_id not in self._aborted:
                self._waiting[request_id] = asyncio.get_running_loop().create_future()
                await self._waiting[request_id]
                await self._check()
            return request_id not in self._aborted
        finally:
            self._waiting.pop(request_id, None)
            self._aborted.discard(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests that are waiting; ignore others."""
        self._aborted |= self._waiting.keys() & set(request_ids)
        self.notify()

    def notify(self) -> None:
        """Let all waiting requests retry."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)


class MultiProcessEngine(Engine):
    """Base of engines that stage, commit, rename, sleep and wake on all ranks."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        incarnation: str,
        lora: LoraConfig,
        named: Mapping[str, Path] | None,
        *,
        call: Call,
        call_anytime: Call,
        no_seeds: str,
    ) -> None:
        """Create an engine that is not started.

        Args:
            model_dir: directory of the model's config and weights.
            incarnation: name of this engine in errors and logs.
            lora: adapter that versions contain, if any.
            named: name -> PEFT directory of adapters that requests may name. Versions may then contain only
                an adapter, for the other requests.
            call: calls all ranks between the same two steps.
            call_anytime: calls all ranks at any time, for operations on the staging copy only.
            no_seeds: why the engine lacks per-request seeds; empty: it supports them.
        """
        self.capabilities = Capabilities(sleep=config.enable_sleep_mode, seeds=not no_seeds)
        self._config = config
        self._model_dir = model_dir
        self._name = incarnation
        self._lora = lora
        self._named = dict(named or {})
        self._no_seeds = no_seeds
        self._vocab = 0
        self._mixture: Mixture | None = None
        """None: experts are not recorded."""
        self._weights = WeightState()
        self._gate = RequestGate(self._weights, self.check)
        self._running: dict[str, str] = {}
        """Request id -> id used in the engine's processes."""
        self._numbers = itertools.count()
        self._updating = asyncio.Lock()
        """Held while weights change or are released, and while the scheduler is paused or resumed."""
        self._call = call
        self._staging = AllRanksStaging(
            call, call_anytime, stage_timeout_s=config.stage_timeout_s, call_timeout_s=CALL_TIMEOUT_S
        )
        self._closed = False

    @property
    def served(self) -> Served:
        return self._weights.served

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request,
            vocab_size=self._vocab,
            max_model_len=self._config.max_model_len,
            running=self._running,
            no_seeds=self._no_seeds,
            adapters=self._named,
        )
        # SGLang aborts by prefix; a leading number keeps any id from being a prefix of another
        self._running[request.id] = name = f"{next(self._numbers)}:{request.id}"
        try:
            if not await self._gate.admitted(request.id):
                return ABORTED
            answer = await self._complete(request, name)
        finally:
            del self._running[request.id]
        await self.check()
        return await self._completion(request, name, answer)

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        if self._weights.asleep:
            raise WeightError(
                f"version {manifest.version}: the engine sleeps, there is no memory to stage in"
            )
        if self._weights.committing:  # the two calls may reach the ranks in any order
            raise WeightError(f"version {manifest.version}: another version is being committed")
        await self._staging.stage(manifest)

    async def adopt(self, epoch: str, version: int) -> None:
        await self.check()
        async with self._updating:
            renamed = self._weights.renamed(epoch, version)
            async with self._changing_weights():
                await self._call("rename", version)
                self._weights.serve(renamed)

    async def wake(self) -> None:
        await self.check()
        if not self.capabilities.sleep:
            raise Unsupported(f"engine {self._name} cannot sleep, so there is nothing to wake")
        async with self._updating:
            if self._weights.asleep:
                with self._weights.poisoned_by_failure("wake"):
                    await self._staging.wake()
                self._weights.wake()

    async def check(self) -> None:
        if self._weights.poisoned:
            raise EngineError(f"engine {self._name} is poisoned: {self._weights.poisoned}")
        if self._closed:
            raise EngineError(f"engine {self._name} is closed")

    async def occupancy(self) -> Occupancy:
        await self.check()
        if self._weights.released:  # running requests were requeued, and the cache is empty
            return Occupancy(0, 0.0)
        return await self._occupancy()

    async def profile(self, file: Path, steps: int) -> None:
        await self.check()
        await self._call("profile", str(file), steps)

    async def live_digest(self) -> int:
        """Return the digest of the live parameters, computed between two steps.

        With one rank it equals the digest of the version's manifest.
        """
        if self._weights.released:
            raise EngineError(f"engine {self._name} has slept: it holds no weights before the next commit")
        return await self._staging.live_digest()

    @abstractmethod
    async def _complete(self, request: Request, name: str) -> Any:
        """Return the response of the engine's processes, which know the request as `name`."""

    @abstractmethod
    async def _completion(self, request: Request, name: str, answer: Any) -> Completion:
        """Return the completion of a request from the response of `_complete`."""

    async def _occupancy(self) -> Occupancy:
        """Return the occupancy of an engine that is not asleep."""
        return Occupancy(*(await self._call("occupancy"))[0])

    async def _read_model(self, model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Read the model properties that requests need; return name -> shape of the checkpoint's tensors.

        Args:
            model: parsed config.json.
        """
        self._vocab = int(model.get("vocab_size") or 0)
        shapes = await asyncio.to_thread(checkpoint_shapes, self._model_dir)
        if self._config.enable_return_routed_experts:
            self._mixture = Mixture.of(shapes, model, self._model_dir)
        return shapes

    @asynccontextmanager
    async def _committing(self, manifest: WeightManifest) -> AsyncIterator[None]:
        """Exclude other updates and hold requests back while the body commits `manifest`.

        Raises:
            WeightError: a version is being staged; staging continues.
        """
        await self.check()
        if self._staging.is_staging:
            raise WeightError(f"version {manifest.version} is not staged: one is being staged")
        with self._weights.pending_commit():
            async with self._updating, self._changing_weights():
                yield

    @asynccontextmanager
    async def _changing_weights(self) -> AsyncIterator[None]:
        """Hold requests back during the body; afterwards let them retry."""
        try:
            with self._weights.changing():
                yield
        finally:
            self._gate.notify()

    async def _release_memory(self, release: Callable[[], Awaitable[None]]) -> None:
        """Go to sleep: serve no version and run `release`, unless the engine is already asleep.

        Args:
            release: requeues running requests with their tokens, and releases all memory on all ranks. No
                step may follow before the next commit. If it fails, the engine is poisoned.
        """
        await self.check()
        if not self.capabilities.sleep:
            raise Unsupported(
                f"engine {self._name} cannot sleep: it was started without engine.enable_sleep_mode"
            )
        async with self._updating:
            if self._weights.asleep:
                return
            if self._staging.is_staging:
                raise WeightError("a version is being staged: the engine cannot sleep now")
            self._weights.release()
            with self._weights.poisoned_by_failure("sleep"):
                await release()
