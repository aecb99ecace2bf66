"""vLLM behind our interface: AsyncLLM here, the model in processes of its own, our part in them in
`vllm_worker.py`.

Weights are staged beside the live ones while requests are decoded and committed between two steps on all
ranks. Which version sampled a token is recorded in the worker at the step that sampled it and fetched for the
requests that lived through a commit.
"""

import asyncio
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.device.shared_layout import TRANSPORT
from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.base import Capabilities, Completion, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.multi_process.engine import ABORTED, CALL_TIMEOUT_S, MultiProcessEngine
from rollout.engines.multi_process.rank_rpc import RankRpcClient, socket_path
from rollout.engines.requests import check_request, spans_from_marks
from rollout.engines.vllm.launch import (
    check_model,
    end_context,
    end_processes,
    engine_arguments,
    launch,
    sampling_parameters,
    set_environment,
    shared_files,
)
from rollout.engines.vllm.lora import first_adapter
from rollout.weights.registry import RECEIVERS

T = TypeVar("T")

EXIT_GRACE_S = 1.0
"""For the engine's processes to end by themselves."""


class VllmEngine(MultiProcessEngine):
    """One AsyncLLM. TP ranks commit at the same step; pipeline and data parallelism are not used."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        incarnation: str,
        lora: LoraConfig = NO_ADAPTERS,
        shared: Path | None = None,
    ) -> None:
        """`shared`: the trainer computes with the live weights, and finds them by this file."""
        super().__init__(config, model_dir, incarnation)
        transports = frozenset(RECEIVERS) if shared is None else frozenset({TRANSPORT})
        self.capabilities = Capabilities(transports=transports, lora=True, sleep=config.enable_sleep_mode)
        self._lora = lora
        self._shared = shared
        self._adapter: Any = None
        """LoRARequest that every request carries, if adapters are served."""
        self._llm: Any = None
        self._ranks = RankRpcClient(self._on_rank_lost)
        self._calls: set[asyncio.Timeout] = set()
        self._lost = False
        """A rank's process is gone."""
        self._pids: set[int] = set()
        self._files: set[Path] = set()
        """What its processes share, which vLLM leaves behind."""
        self._vocab = 0
        self._numbers = itertools.count()
        self._paused = False
        self._closed = False

    async def start(self) -> None:
        set_environment(self._config)
        ready = False
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                model = await asyncio.to_thread(check_model, self._config, self._model_dir, self._lora)
                await self._launch()
                await self._install(model)
                # the first step allocates and compiles, and fails where an attention kernel lacks this
                # model's shape
                await self._complete(Request("warm-up", (0,), Sampling(max_tokens=2)), "warm-up")
                self._files = shared_files(self._pids)
            ready = True
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: vLLM not ready within {self._config.start_timeout_s:g} s"
            ) from None
        finally:
            if not ready:
                await self.close()

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request, vocab_size=self._vocab, max_model_len=self._config.max_model_len, running=self._running
        )
        number = next(self._numbers)
        self._running[request.id] = name = f"{number}:{request.id}"
        try:
            if not await self._admitted(request.id):
                return ABORTED
            changes, version = self._changes, self._served.version
            output = await self._complete(request, name)
        finally:
            del self._running[request.id]
        await self.check()
        tokens = tuple(output.token_ids)
        logprobs = tuple(row[token].logprob for token, row in zip(tokens, output.logprobs or (), strict=True))
        marks = [(0, version)] if changes == self._changes else (await self._call("marks", str(number)))[0]
        if tokens and (not marks or marks[0][0] != 0):
            raise EngineError(f"request {request.id}: no record of the versions of its {len(tokens)} tokens")
        return Completion(tokens, logprobs, spans_from_marks(marks, len(tokens)), str(output.finish_reason))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._abort_waiting(request_ids)
        names = [self._running[i] for i in request_ids if i in self._running]
        if names and self._llm is not None:
            await self._llm.abort(names)

    async def pause(self) -> None:
        await self.check()
        async with self._updating:
            await self._pause_scheduler()
            self._paused = True

    async def resume(self) -> None:
        await self.check()
        async with self._updating:
            if not self._weights_released:  # else the next commit resumes
                await self._resume_scheduler()
            self._paused = False

    async def check(self) -> None:
        if self._poisoned:
            raise EngineError(f"engine {self._name} is poisoned: {self._poisoned}")
        if self._llm is None or self._closed:
            raise EngineError(f"engine {self._name} is {'closed' if self._closed else 'not started'}")
        if self._llm.errored:
            raise EngineError(f"engine {self._name}: vLLM's engine process died")

    async def close(self) -> None:
        self._closed = True
        self._wake_waiting()
        self._ranks.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(Exception):  # a dead engine process has ended its requests already
                await llm.abort(list(self._running.values()))
            async with (
                asyncio.TaskGroup() as group
            ):  # vLLM waits for its workers, long; ours need no more than a moment
                group.create_task(asyncio.to_thread(llm.shutdown), name="vllm-shutdown")
                group.create_task(asyncio.to_thread(end_processes, self._pids, EXIT_GRACE_S), name="vllm-end")
            for path in self._files:
                path.unlink(missing_ok=True)
            end_context(llm)
            if self._shared is not None:
                self._shared.unlink(missing_ok=True)

    def _arguments(self) -> dict[str, Any]:
        """Of vLLM's AsyncEngineArgs."""
        return engine_arguments(self._config, self._model_dir, self._name, self._lora)

    async def _give_back(self) -> None:
        """Running requests are preempted, with their tokens; the scheduler stands still until the next
        commit."""
        await self._pause_scheduler()
        await self._drop_kv()
        # of a model with an adapter no version brings the base weights back: they wait in host memory
        await self._updates.sleep(1 if self._lora.rank else 2)

    async def _launch(self) -> None:
        before = {child.pid for child in multiprocessing.active_children()}
        launching = asyncio.get_running_loop().run_in_executor(None, launch, self._arguments())
        try:
            self._llm = await asyncio.shield(launching)
        except asyncio.CancelledError:
            end_processes(
                {child.pid for child in multiprocessing.active_children() if child.pid} - before, EXIT_GRACE_S
            )
            await asyncio.wait([launching])
            with suppress(EngineError):
                self._llm = launching.result()
            raise

    async def _install(self, model: dict[str, Any]) -> None:
        self._vocab = int(model.get("vocab_size") or 0)
        shapes = await asyncio.to_thread(checkpoint_shapes, self._model_dir)
        if self._lora.rank:
            shapes = await self._load_adapter(shapes)
        architecture = next(iter(model.get("architectures") or ()), "")
        with tempfile.TemporaryDirectory(
            prefix="tether-ranks-"
        ) as directory:  # what is connected needs no name any more
            shared = str(self._shared) if self._shared else ""
            ranks = await self._call(
                "install",
                shapes,
                architecture,
                bool(self._lora.rank),
                self._config.staging_mb,
                directory,
                shared,
            )
            for rank, found in enumerate(ranks):
                self._pids |= {found["pid"], found["parent"]} - {os.getpid()}
                if found["error"]:
                    raise EngineError(
                        f"engine {self._name}, rank {rank}: {self._model_dir} cannot be updated in place: {found['error']}"
                    )
            await self._ranks.connect([socket_path(Path(directory), rank) for rank in range(len(ranks))])

    async def _load_adapter(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Give vLLM an adapter to begin with. Returns the shapes of its tensors."""
        whole = {name: tuple(shape) for name, shape in shapes.items()}
        with tempfile.TemporaryDirectory(prefix="tether-adapter-") as directory:
            self._adapter = first_adapter(Path(directory), whole, self._lora, self._config.dtype)
            if not await self._llm.add_lora(self._adapter) or not await self._llm.pin_lora(
                self._adapter.lora_int_id
            ):
                raise EngineError(f"engine {self._name}: vLLM did not take the adapter")
        return {
            name: list(shape)
            for name, shape in adapter_shapes(adapter_targets(whole, self._lora), self._lora.rank).items()
        }

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """The answers of all ranks to a method of their worker extension, given between two steps."""
        if self._llm is None:
            raise EngineError(f"engine {self._name} is closed")
        found: list[Any] = await self._answer(self._llm.collective_rpc(f"tether_{method}", args=args), method)
        return found

    async def _answer(self, answer: Awaitable[T], what: str) -> T:
        """What vLLM answers, within a limit that ends when one of its processes has died. Raises
        EngineError."""
        limit = asyncio.timeout(0 if self._lost else CALL_TIMEOUT_S)
        try:
            async with limit:
                self._calls.add(limit)
                return await answer
        except TimeoutError:
            why = "a rank's process is gone" if self._lost else f"none within {CALL_TIMEOUT_S:g} s"
            raise EngineError(f"engine {self._name}: no answer to {what}: {why}") from None
        except Exception as error:
            raise EngineError(f"engine {self._name}: {what}: {error!r}") from error
        finally:
            self._calls.discard(limit)

    async def _pause_scheduler(self) -> None:
        """Have the scheduler stand still between two steps."""
        await self._answer(self._llm.engine_core.pause_scheduler_async("keep", False), "pause")

    async def _resume_scheduler(self) -> None:
        await self._answer(self._llm.engine_core.resume_scheduler_async(), "resume")

    async def _drop_kv(self) -> None:
        """Preempt what runs, with its tokens. Raises EngineError: the cache may be there still."""
        if not await self._answer(
            self._llm.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache"
        ):
            raise EngineError(f"engine {self._name}: the KV cache could not be dropped")

    def _on_rank_lost(self) -> None:
        """vLLM says that a process has died to who waits for a request, and to nobody else."""
        self._lost = True
        for limit in self._calls:
            limit.reschedule(0)

    async def _call_anytime(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, while they go on with their steps."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._ranks.call_each(method, *arguments)
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: no answer to {method} within {CALL_TIMEOUT_S:g} s"
            ) from None
        except EngineError as error:
            raise EngineError(f"engine {self._name}: {error}") from error

    async def _complete(self, request: Request, name: str) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = {
            "prompt_token_ids": list(request.prompt),
            "cache_salt": f"{self._served.epoch}/{self._served.version}/{self._changes}",
        }
        output = None
        try:
            async for answer in self._llm.generate(
                prompt, sampling_parameters(request.sampling), name, lora_request=self._adapter
            ):
                output = answer.outputs[0]
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise EngineError(f"request {request.id}: {error.__cause__ or error}") from error
        if output is None:
            raise EngineError(f"request {request.id}: vLLM ended it without an answer")
        return output

    async def _commit(self, manifest: WeightManifest) -> float:
        slept = self._weights_released  # its KV cache is gone, and its scheduler stands still
        recompute = not slept and self._config.kv is KvPolicy.RECOMPUTE and bool(self._running)
        start = time.perf_counter()
        if recompute and not self._paused:
            await self._pause_scheduler()

        async def drop_kv() -> None:
            try:
                if recompute:
                    await self._drop_kv()
            except EngineError as error:
                raise PoisonedError(
                    f"version {manifest.version} is live, but the KV cache of the one before may be there still: {error}"
                ) from error

        try:
            ranks = await self._apply(manifest, drop_kv)
        except PoisonedError:
            raise
        except WeightError:
            if recompute and not self._paused:
                await self._resume_scheduler()
            raise
        if (recompute or slept) and not self._paused:
            await self._resume_scheduler()
        return (
            (time.perf_counter() - start) * 1e3
            if recompute
            else float(max(rank["copy_ms"] for rank in ranks))
        )
