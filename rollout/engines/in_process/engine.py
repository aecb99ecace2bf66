"""What the engines with a model in this process share: one thread decodes, one token for every running
request and step.

Between two steps it takes in new requests, aborts, pauses and commits; so no update can fall into a forward
pass, and the version of a token is known when it is sampled.
"""

import asyncio
import itertools
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Completion, Engine, EngineConfig, KvPolicy, Request, Served
from rollout.engines.in_process.running_request import Decoder, RunningRequest
from rollout.engines.requests import check_request, read_config, spans_of
from rollout.staging.in_process import InProcessStaging
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging import Committable, Staging, digest_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine has loaded."""

    decoder: Decoder
    weights: Committable
    """The parameters that updates change."""
    staging: Staging
    checkpoint: Callable[[], Mapping[str, torch.Tensor]]
    """The live weights by the names that manifests give them."""
    memory: ReleasableMemory | None = None
    """What sleep gives back; None: the engine cannot sleep."""


class InProcessEngine(Engine):
    """A subclass loads the model and says its `capabilities`."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._name = incarnation
        self._served = Served()
        self._vocab = 0
        self._wake = threading.Condition()
        self._ids: dict[str, int] = {}
        """Request id -> key in `_rows`."""
        self._numbers = itertools.count()
        self._rows: dict[int, tuple[RunningRequest, asyncio.Future[str]]] = {}
        """Every request that is waiting or running, in order of arrival; guarded by `_wake`."""
        self._aborted: set[int] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._paused = False
        self._weights_released = False
        """It has slept, and no version was committed since: there are no weights to generate with."""
        self._closing = False
        self._error: BaseException | None = None
        self._loading: asyncio.Future[LoadedModel] | None = None
        self._thread: threading.Thread | None = None

    @property
    def served(self) -> Served:
        return self._served

    async def start(self) -> None:
        self._vocab = int(read_config(self._model_dir).get("vocab_size", 0))
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._loading = self._loop.run_in_executor(None, self._load)
                self._model = await asyncio.shield(self._loading)
        except TimeoutError:
            raise EngineError(
                f"engine {self._config.name}: {self._model_dir} not loaded within {self._config.start_timeout_s:g} s"
            ) from None
        self._updates = InProcessStaging(self._model.staging, self._config.stage_timeout_s)
        self._thread = threading.Thread(
            target=self._run, name=f"{self._config.name}-engine-{self._name}", daemon=True
        )
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request, vocab_size=self._vocab, max_model_len=self._config.max_model_len, running=self._ids
        )
        row = RunningRequest(request, _generator(request.sampling.seed))
        ended: asyncio.Future[str] = self._loop.create_future()
        number = self._ids[request.id] = next(self._numbers)
        try:
            self._hand_over(lambda: self._rows.update({number: (row, ended)}))
            reason = await ended
        except asyncio.CancelledError:
            self._end({number})
            raise
        finally:
            del self._ids[request.id]
        return Completion(tuple(row.tokens), tuple(row.logprobs), spans_of(row.versions), reason)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._end({self._ids[i] for i in request_ids if i in self._ids})

    async def pause(self) -> None:
        await self._between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._between_steps(lambda: self._set_paused(False))

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        await self._updates.stage(manifest)

    async def commit(self, manifest: WeightManifest) -> float:
        await self.check()
        return await self._between_steps(lambda: self._apply(manifest))

    async def adopt(self, epoch: str, version: int) -> None:
        if self._served.version < 0:
            raise WeightError(f"{self._name} serves no version yet that could be renamed")
        await self._between_steps(lambda: self._set_served(Served(epoch, version, self._served.digest)))

    async def live_digest(self) -> int:
        """Digest of the live parameters, read between two steps; that of the manifest whose bytes they
        are."""
        return await self._between_steps(self._digest)

    async def sleep(self) -> None:
        await self.check()
        if self._model.memory is None:
            return await super().sleep()
        self._updates.sleep()
        await self._between_steps(self._give_back)

    async def wake(self) -> None:
        await self.check()
        if self._model.memory is None:
            return await super().wake()
        await self._between_steps(self._model.memory.restore)
        self._updates.wake()

    async def check(self) -> None:
        if self._error is not None:
            raise EngineError(f"engine {self._name} died: {self._error!r}")
        if self._thread is None or self._closing:
            raise EngineError(f"engine {self._name} is {'closed' if self._closing else 'not started'}")

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._updates.staging.close()
            if (
                self._model.memory is not None and torch.cuda.is_available()
            ):  # this process lives on for a moment
                self._model.memory.release()
        elif (
            self._loading is not None
        ):  # a start that was given up: its thread goes on, and what it takes is given back
            await asyncio.wait({self._loading}, timeout=self._config.start_timeout_s)
        self._unload()

    @abstractmethod
    def _load(self) -> LoadedModel:
        """Load the model; called once, in a thread.

        Raises:
            EngineError: naming the setting or the file that is to blame.
        """

    def _unload(self) -> None:
        """Give back what `_load` took, if anything; called when the thread has ended, once or more often."""

    def _end(self, numbers: set[int]) -> None:
        with self._wake:
            self._aborted |= numbers
            self._wake.notify_all()

    async def _between_steps(self, job: Callable[[], T]) -> T:
        """Have the decoding thread do something between two steps; not undone when the caller is
        cancelled."""
        await self.check()
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                self._answer(done, job())
            except Exception as error:
                self._refuse(done, error)

        done.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # a caller who was cancelled does not look at it
        self._hand_over(lambda: self._jobs.append(run))
        return await asyncio.shield(done)

    def _hand_over(self, put: Callable[[], None]) -> None:
        """Give the decoding thread something to do.

        Raises:
            EngineError: if it has ended, or is about to: nobody would do it.
        """
        with self._wake:
            if self._closing:
                raise EngineError(f"engine {self._name} is closed")
            put()
            self._wake.notify_all()

    def _answer(self, future: "asyncio.Future[T]", result: T) -> None:
        self._loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

    def _refuse(self, future: "asyncio.Future[Any]", error: BaseException) -> None:
        self._loop.call_soon_threadsafe(lambda: None if future.done() else future.set_exception(error))

    # Everything below runs in the decoding thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._error = error
        with self._wake:
            self._closing = True
            for row, ended in self._rows.values():
                self._refuse(
                    ended,
                    EngineError(
                        f"request {row.request.id}: engine {self._name} {self._error or 'was closed'}"
                    ),
                )
            self._rows.clear()
            while self._jobs:
                self._jobs.popleft()()

    def _turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(
                lambda: self._closing or self._jobs or self._aborted or (self._rows and not self._frozen)
            )
            jobs, self._jobs = self._jobs, deque()
            closing = self._closing
        for job in jobs:
            job()
        if closing or self._error is not None:  # poisoned by a job: not one more token
            return False
        with self._wake:
            for number in self._aborted:
                self._finish(number, "abort")
            self._aborted.clear()
            rows = (
                {} if self._frozen else dict(itertools.islice(self._rows.items(), self._config.max_running))
            )
        if rows:
            self._model.decoder.step([row for row, _ in rows.values()], self._served.version)
            with self._wake:
                for number, (row, _) in rows.items():
                    if row.finish_reason:
                        self._finish(number, row.finish_reason)
        return True

    @property
    def _frozen(self) -> bool:
        return self._paused or self._weights_released

    def _finish(self, number: int, reason: str) -> None:
        if number in self._rows:
            self._answer(self._rows.pop(number)[1], reason)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _set_served(self, served: Served) -> None:
        self._served = served

    def _digest(self) -> int:
        if self._weights_released:
            raise EngineError(f"engine {self._name} has slept: it holds no weights before the next commit")
        return digest_of(self._model.checkpoint())

    def _give_back(self) -> None:
        assert self._model.memory is not None
        self._served = Served()
        self._weights_released = True
        self._model.decoder.forget([row for row, _ in self._rows.values()])
        self._model.memory.release()

    def _apply(self, manifest: WeightManifest) -> float:
        start = time.perf_counter()
        served = self._updates.staging.take(manifest)
        try:
            self._model.weights.apply()
        except BaseException as error:
            self._error = PoisonedError(f"version {manifest.version}: {error}")
            raise self._error from error
        self._served = served
        self._weights_released = False
        if self._config.kv is KvPolicy.RECOMPUTE:
            self._model.decoder.forget([row for row, _ in self._rows.values()])
        return (time.perf_counter() - start) * 1e3


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
