"""Runs a model in the worker's process; one thread decodes a token per step for all running requests.

New requests, aborts, pauses and commits are processed between two steps. Therefore no update overlaps a
forward pass, and the version of a token is known when it is sampled.
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
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from protocol.device.profiles import StepProfile
from protocol.device.shared_layout import rank_file
from protocol.device.shared_tensors import SharedTensors
from protocol.errors import EngineError, PoisonedError
from protocol.messages import WeightManifest
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import (
    Capabilities,
    Completion,
    Engine,
    EngineConfig,
    KvPolicy,
    Occupancy,
    Request,
    Served,
)
from rollout.engines.in_process.running_request import Decoder, RunningRequest
from rollout.engines.requests import check_request, read_config, spans_of
from rollout.engines.weight_state import WeightState
from rollout.staging.in_process import InProcessStaging
from rollout.staging.staging import Committable, Staging

T = TypeVar("T")
NONE_NAMED: Mapping[str, Path] = {}
"""No named adapters."""


class Releasable(Protocol):
    """Releasable memory of a model, such as `ReleasableMemory`."""

    def release(self) -> None:
        """Release the memory. Idempotent."""

    def restore(self) -> None:
        """Reallocate the memory. Idempotent. Raises EngineError if memory is insufficient."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model with the handlers for weight updates and sleep."""

    decoder: Decoder
    weights: Committable
    """Parameters that updates change."""
    staging: Staging
    digest: Callable[[], int]
    """Returns the digest that a manifest of the live weights would have."""
    memory: Releasable | None = None
    """Memory that sleep releases; None: the engine cannot sleep."""


class InProcessEngine(Engine):
    """Base of engines whose model runs in this process; subclasses load the model."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        incarnation: str,
        lora: LoraConfig = NO_ADAPTERS,
        shared: Path | None = None,
        named: Mapping[str, Path] = NONE_NAMED,
    ) -> None:
        """Create an engine that is not started; arguments: see `make_engine`."""
        self.capabilities = Capabilities(sleep=shared is None)
        self._config = config
        self._lora, self._named = lora, named
        self._shared = shared
        self._shared_memory: SharedTensors | None = None
        """Parameters shared with the trainer, if any; set by `_load`."""
        self._model_dir = model_dir
        self._name = incarnation
        self._weights = WeightState()
        """Written by the decoding thread."""
        self._vocab = 0
        self._wake = threading.Condition()
        self._ids: dict[str, int] = {}
        """Request id -> key in `_rows`."""
        self._numbers = itertools.count()
        self._rows: dict[int, tuple[RunningRequest, asyncio.Future[str]]] = {}
        """Waiting and running requests in order of arrival; guarded by `_wake`."""
        self._aborted: set[int] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._paused = False
        self._profile = StepProfile()
        """Used only by the decoding thread."""
        self._closing = False
        self._error: BaseException | None = None
        """Exception that ended the decoding thread."""
        self._loading: asyncio.Future[LoadedModel] | None = None
        self._thread: threading.Thread | None = None

    @property
    def served(self) -> Served:
        return self._weights.served

    async def start(self) -> None:
        self._vocab = int(read_config(self._model_dir).get("vocab_size", 0))
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._loading = self._loop.run_in_executor(None, self._load)
                self._model = await asyncio.shield(self._loading)
        except TimeoutError:
            raise EngineError(
                f"engine {self._config.name}: {self._model_dir} not loaded "
                f"within {self._config.start_timeout_s:g} s"
            ) from None
        self._staging = InProcessStaging(self._model.staging, self._config.stage_timeout_s)
        self._thread = threading.Thread(
            target=self._run, name=f"{self._config.name}-engine-{self._name}", daemon=True
        )
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request,
            vocab_size=self._vocab,
            max_model_len=self._config.max_model_len,
            running=self._ids,
            adapters=self._named,
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
        experts = np.concatenate(row.experts) if row.experts else None
        return Completion(tuple(row.tokens), tuple(row.logprobs), spans_of(row.versions), reason, experts)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._end({self._ids[i] for i in request_ids if i in self._ids})

    async def pause(self) -> None:
        await self._between_steps(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._between_steps(lambda: self._set_paused(False))

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        await self._staging.stage(manifest)

    async def commit(self, manifest: WeightManifest) -> float:
        await self.check()
        return await self._between_steps(lambda: self._copy_staged_weights(manifest))

    async def adopt(self, epoch: str, version: int) -> None:
        await self._between_steps(lambda: self._weights.serve(self._weights.renamed(epoch, version)))

    async def profile(self, file: Path, steps: int) -> None:
        try:
            await self._between_steps(lambda: self._profile.begin_or_end(str(file), 0, steps))
        except OSError as error:
            raise EngineError(f"engine {self._name}: the trace cannot be written: {error}") from error

    async def live_digest(self) -> int:
        """Return the digest of the live parameters, computed between two steps as for a manifest."""
        return await self._between_steps(self._digest)

    async def sleep(self) -> None:
        await self.check()
        if self._model.memory is None:
            return await super().sleep()
        await self._staging.sleep()
        await self._between_steps(self._release_memory)

    async def wake(self) -> None:
        await self.check()
        if self._model.memory is None:
            return await super().wake()
        await self._between_steps(self._model.memory.restore)
        self._weights.wake()
        self._staging.wake()

    async def occupancy(self) -> Occupancy:
        await self.check()
        return Occupancy(0 if self._weights.released else min(len(self._rows), self._config.max_running))

    async def check(self) -> None:
        if self._weights.poisoned:
            raise EngineError(f"engine {self._name} is poisoned: {self._weights.poisoned}")
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
            await asyncio.to_thread(self._staging.staging.close)
            if self._model.memory is not None and torch.cuda.is_available():
                # this process may continue to use the device
                await asyncio.to_thread(self._model.memory.release)
        elif self._loading is not None:
            # `start` was cancelled: its thread still runs, and `_unload` releases its resources
            await asyncio.wait({self._loading}, timeout=self._config.start_timeout_s)
        self._unload()

    @abstractmethod
    def _load(self) -> LoadedModel:
        """Load the model; called once, in a thread.

        Raises:
            EngineError: loading failed; the message names the setting or file.
        """

    def _unload(self) -> None:
        """Release the resources of `_load`, if any; called at least once, after the thread has ended."""
        if self._shared_memory is not None:
            self._shared_memory.close()
        if self._shared is not None:
            for rank in range(self._config.tensor_parallel_size):
                rank_file(self._shared, rank).unlink(missing_ok=True)

    def _end(self, numbers: set[int]) -> None:
        with self._wake:
            self._aborted |= numbers
            self._wake.notify_all()

    async def _between_steps(self, job: Callable[[], T]) -> T:
        """Run `job` in the decoding thread between two steps.

        Cancelling the caller does not cancel the job.
        """
        await self.check()
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                self._set_result(done, job())
            except Exception as error:
                self._set_exception(done, error)

        # retrieve the exception even if the caller was cancelled
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._hand_over(lambda: self._jobs.append(run))
        return await asyncio.shield(done)

    def _hand_over(self, put: Callable[[], None]) -> None:
        """Run `put`, which queues work for the decoding thread, and wake the thread.

        Raises:
            EngineError: the thread has ended or is ending, so the work would never run.
        """
        with self._wake:
            if self._closing:
                raise EngineError(f"engine {self._name} is closed")
            put()
            self._wake.notify_all()

    def _set_result(self, future: "asyncio.Future[T]", result: T) -> None:
        self._loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

    def _set_exception(self, future: "asyncio.Future[Any]", error: BaseException) -> None:
        self._loop.call_soon_threadsafe(lambda: None if future.done() else future.set_exception(error))

    # Everything below runs in the decoding thread.

    def _run(self) -> None:
        try:
            while self._run_step():
                pass
        except BaseException as error:
            self._error = error
        cause = self._weights.poisoned or self._error or "was closed"
        with self._wake:
            self._closing = True
            for row, ended in self._rows.values():
                self._set_exception(
                    ended, EngineError(f"request {row.request.id}: engine {self._name} {cause}")
                )
            self._rows.clear()
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            job()

    def _run_step(self) -> bool:
        """Run jobs and aborts, then decode one token per request; return False to end the thread."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._closing or self._jobs or self._aborted or (self._rows and not self._frozen)
            )
            jobs, self._jobs = self._jobs, deque()
            closing = self._closing
        for job in jobs:
            job()
        if closing or self._weights.poisoned:  # poisoned by a job: decode no further token
            return False
        with self._wake:
            aborted = dict.fromkeys(self._aborted & self._rows.keys(), "abort")
            self._aborted.clear()
        self._finish(aborted)
        with self._wake:
            rows = (
                {} if self._frozen else dict(itertools.islice(self._rows.items(), self._config.max_running))
            )
        if rows:
            self._profile.step_begins()
            self._model.decoder.step([row for row, _ in rows.values()], self._weights.served.version)
            reasons = {number: row.finish_reason for number, (row, _) in rows.items()}
            self._finish({number: reason for number, reason in reasons.items() if reason})
        return True

    @property
    def _frozen(self) -> bool:
        return self._paused or self._weights.released

    def _finish(self, reasons: Mapping[int, str]) -> None:
        """Finish rows, given by number -> reason.

        The decoder forgets rows outside the lock: it calls the model's ranks through the event loop, which
        may wait for the lock.
        """
        if not reasons:
            return
        self._model.decoder.forget([self._rows[number][0] for number in reasons])
        with self._wake:
            for number, reason in reasons.items():
                self._set_result(self._rows.pop(number)[1], reason)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _digest(self) -> int:
        if self._weights.released:
            raise EngineError(f"engine {self._name} has slept: it holds no weights before the next commit")
        return self._model.digest()

    def _release_memory(self) -> None:
        assert self._model.memory is not None
        self._weights.release()
        self._model.decoder.forget([row for row, _ in self._rows.values()])
        self._model.memory.release()

    def _copy_staged_weights(self, manifest: WeightManifest) -> float:
        """Commit the staged version; return the duration in milliseconds."""
        start = time.perf_counter()
        with self._weights.commit(manifest):
            self._staging.staging.take(manifest)
            try:
                self._model.weights.apply()
            except BaseException as error:
                raise PoisonedError(f"version {manifest.version}: {error}") from error
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
