"""Serves with vLLM: AsyncLLM in this process, the model in vLLM's processes, extended by `worker.py`.

Weights are staged next to the live ones during decoding, and committed between two steps on all ranks. The
worker attaches log-probabilities and the sampling version to each step's result. The scheduler records both
with the accepted tokens, and a request's last message contains its record.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.device.shared_layout import rank_file
from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from protocol.weights.draft_head import PREFIX, head_shapes
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.base import Completion, EngineConfig, KvPolicy, Occupancy, Request, Sampling
from rollout.engines.multi_process.engine import MultiProcessEngine
from rollout.engines.multi_process.rank_rpc import start_error
from rollout.engines.multi_process.routed_experts import recorded_experts
from rollout.engines.named_adapters import NamedAdapter, covering, read_named
from rollout.engines.requests import read_config, spans_from_marks
from rollout.engines.vllm.drafts.models import MODELS
from rollout.engines.vllm.imports import import_vllm
from rollout.engines.vllm.launch import (
    WORKER_EXTENSION,
    VllmProcesses,
    check_model,
    engine_arguments,
    sampling_parameters,
)
from rollout.engines.vllm.lora import first_adapter, named_request
from rollout.engines.vllm.step_records import RECORD


class VllmEngine(MultiProcessEngine):
    """Engine with one AsyncLLM; TP ranks commit at the same step, and no other parallelism is used."""

    worker_extension = WORKER_EXTENSION
    """Class that vLLM mixes into its workers; benchmarks override it."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        incarnation: str,
        lora: LoraConfig = NO_ADAPTERS,
        shared: Path | None = None,
        named: Mapping[str, Path] | None = None,
    ) -> None:
        """Create an engine that is not started; further arguments: see `MultiProcessEngine`.

        Args:
            shared: file through which the trainer finds the live weights; None: the trainer has its own.
        """
        self._vllm = VllmProcesses(incarnation)
        drafts = config.drafts != "off"
        super().__init__(
            config,
            model_dir,
            incarnation,
            lora,
            named,
            call=self._vllm.call,
            call_anytime=self._vllm.call_anytime,
            no_seeds="drafts decide how many random numbers a seed is used for" if drafts else "",
        )
        self._shared = shared
        self._adapters: dict[str, Any] = {}
        """Adapter name -> LoRARequest; "" is the adapter in versions, if any."""
        self._paused = False

    @classmethod
    def preload(cls, config: EngineConfig) -> Callable[[], None] | None:
        return import_vllm(config)

    async def start(self) -> None:
        self._vllm.prepare(self._config)
        ready = False
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                named = await asyncio.to_thread(read_named, self._named, self._model_dir)
                self._lora = covering(adapter.config for adapter in named.values()) if named else self._lora
                model = await asyncio.to_thread(check_model, self._config, self._model_dir, self._lora)
                await self._vllm.start(
                    engine_arguments(
                        self._config,
                        self._model_dir,
                        self._name,
                        self._lora,
                        self.worker_extension,
                        len(named),
                    )
                )
                await self._install(model, list(named.values()))
                # the first step allocates and compiles; it fails if an attention kernel does not support this
                # model's shape
                await self._complete(Request("warm-up", (0,), Sampling(max_tokens=2)), "warm-up")
                self._vllm.find_shared_files()
            ready = True
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: vLLM not ready within {self._config.start_timeout_s:g} s"
            ) from None
        finally:
            if not ready:
                await self.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._gate.abort(request_ids)
        names = [self._running[i] for i in request_ids if i in self._running]
        if names and self._vllm.llm is not None:
            await self._vllm.llm.abort(names)

    async def pause(self) -> None:
        await self.check()
        async with self._updating:
            await self._vllm.pause_scheduler()
            self._paused = True

    async def resume(self) -> None:
        await self.check()
        async with self._updating:
            if not self._weights.released:  # otherwise the next commit resumes
                await self._vllm.resume_scheduler()
            self._paused = False

    async def commit(self, manifest: WeightManifest) -> float:
        async with self._committing(manifest):
            slept = self._weights.released  # after sleep there is no KV cache, and the scheduler is paused
            recompute = not slept and self._config.kv is KvPolicy.RECOMPUTE and bool(self._running)
            start = time.perf_counter()
            if recompute and not self._paused:
                await self._vllm.pause_scheduler()
            try:
                with self._weights.commit(manifest):
                    ranks = await self._staging.commit(manifest)
                    if recompute:
                        await self._drop_old_kv(manifest)
            except PoisonedError:
                raise
            except WeightError:  # the live weights are untouched
                if recompute and not self._paused:
                    await self._vllm.resume_scheduler()
                raise
            if (recompute or slept) and not self._paused:
                await self._vllm.resume_scheduler()
            paused_ms = (time.perf_counter() - start) * 1e3
        return paused_ms if recompute else max(rank.copy_ms for rank in ranks)

    async def sleep(self) -> None:
        await self._release_memory(self._release_on_ranks)

    async def check(self) -> None:
        await super().check()
        if self._vllm.llm is None:
            raise EngineError(f"engine {self._name} is not started")
        if self._vllm.llm.errored or self._vllm.rank_lost:
            raise EngineError(f"engine {self._name}: vLLM's engine process, or one of its ranks, died")

    async def close(self) -> None:
        self._closed = True
        self._gate.notify()
        was_started = await self._vllm.stop(self._running.values())
        if was_started and self._shared is not None:
            for rank in range(self._config.tensor_parallel_size):
                rank_file(self._shared, rank).unlink(missing_ok=True)

    async def _drop_old_kv(self, manifest: WeightManifest) -> None:
        """Drop the KV cache of the version before `manifest`.

        Raises:
            PoisonedError: the old cache may still be in use under the new weights.
        """
        try:
            await self._vllm.drop_kv()
        except EngineError as error:
            raise PoisonedError(
                f"version {manifest.version} is live, but the KV cache of the version before it may still be "
                f"in use: {error}"
            ) from error

    async def _occupancy(self) -> Occupancy:
        return await self._vllm.occupancy()

    async def _release_on_ranks(self) -> None:
        """Preempt running requests, keeping their tokens, and release all memory; the next commit resumes."""
        await self._vllm.pause_scheduler()
        await self._vllm.drop_kv()
        # Versions contain neither an adapter's base weights nor a complete draft model: keep those on the
        # host.
        await self._staging.sleep(1 if self._lora.rank or self._config.drafts in MODELS else 2)

    async def _install(self, model: dict[str, Any], named: Sequence[NamedAdapter]) -> None:
        """Install the extension in all workers, and connect to their sockets."""
        shapes = await self._read_model(model)
        if self._lora.rank:
            shapes = await self._load_adapters(shapes, named)
        if self._config.trained_head:
            head = head_shapes(read_config(Path(self._config.trained_head)))
            shapes |= {PREFIX + name: shape for name, shape in head.items()}
        # connected sockets no longer need their files
        with tempfile.TemporaryDirectory(prefix="tether-ranks-") as directory:
            ranks = await self._call(
                "install",
                shapes,
                next(iter(model.get("architectures") or ()), ""),
                bool(self._lora.rank),
                self._config.staging,
                self._config.staging_mb,
                directory,
                str(self._shared) if self._shared else "",
            )
            self._vllm.add_pids(pid for rank in ranks for pid in (rank["pid"], rank["parent"]))
            for number, rank in enumerate(ranks):
                if rank["error"]:
                    raise start_error(rank["error"])(
                        f"engine {self._name}, rank {number}: {self._model_dir} cannot be updated in place: "
                        f"{rank['error']}"
                    )
            await self._vllm.connect(Path(directory), len(ranks))
        await self._staging.divide([rank["unplaced"] for rank in ranks])
        self.draft_digest = "-".join(f"{rank['draft']:016x}" for rank in ranks if rank["draft"] is not None)

    async def _load_adapters(
        self, shapes: Mapping[str, tuple[int, ...]], named: Sequence[NamedAdapter]
    ) -> dict[str, tuple[int, ...]]:
        """Load a no-op adapter and the named ones into vLLM; return the shapes of the no-op adapter."""
        with tempfile.TemporaryDirectory(prefix="tether-adapter-") as directory:
            first = first_adapter(Path(directory), shapes, self._lora, self._config.dtype)
            others = {adapter.name: named_request(adapter, i) for i, adapter in enumerate(named)}
            llm = self._vllm.llm
            for adapter in (first, *others.values()):
                if not await llm.add_lora(adapter) or not await llm.pin_lora(adapter.lora_int_id):
                    raise EngineError(f"engine {self._name}: vLLM did not load adapter {adapter.lora_name!r}")
            # base model requests use the no-op adapter: on CPU, vLLM adds the last slot's adapter to rows
            # without one
            self._adapters = {"": first, **others}
        return adapter_shapes(adapter_targets(shapes, self._lora), self._lora.rank)

    async def _complete(self, request: Request, name: str) -> Any:
        """Return vLLM's RequestOutput."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        output = None
        try:
            async for answer in self._vllm.llm.generate(
                {"prompt_token_ids": list(request.prompt)},
                sampling_parameters(request.sampling),
                name,
                lora_request=self._adapters.get(request.adapter),
            ):
                output = answer
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise EngineError(f"request {request.id}: {error.__cause__ or error}") from error
        if output is None:
            raise EngineError(f"request {request.id}: vLLM ended it without an answer")
        return output

    async def _completion(self, request: Request, name: str, answer: Any) -> Completion:
        output = answer.outputs[0]
        tokens, logprobs, marks = list(output.token_ids), b"", list[tuple[int, int]]()
        if answer.kv_transfer_params:
            logprobs, marks = answer.kv_transfer_params[RECORD]
        elif tokens and (found := await self._vllm.sampled(name)) is not None:  # aborted
            tokens, logprobs, marks = np.frombuffer(found[0], np.int32).tolist(), *found[1:]
        values = np.frombuffer(logprobs, np.float32).tolist()
        if len(values) != len(tokens):
            raise EngineError(f"request {request.id}: a record of {len(values)} of its {len(tokens)} tokens")
        spans = spans_from_marks(marks, len(tokens))
        experts = self._experts(request, answer, len(tokens))
        cached = answer.num_cached_tokens or 0
        return Completion(tuple(tokens), tuple(values), spans, str(output.finish_reason), experts, cached)

    def _experts(self, request: Request, answer: Any, count: int) -> NDArray[np.uint16] | None:
        """Return the experts recorded by vLLM; None if recording is off or no token was sampled.

        Args:
            answer: vLLM's output of the request.
            count: number of tokens of the completion.
        """
        if self._mixture is None or not count:
            return None
        output = answer.outputs[0]
        # some vLLM versions report the prompt's experts separately
        parts = [getattr(answer, "prompt_routed_experts", None), getattr(output, "routed_experts", None)]
        rows = [np.asarray(part) for part in parts if part is not None]
        inputs = len(request.prompt) + count - 1
        return recorded_experts(
            request.id,
            np.concatenate(rows) if rows else None,
            self._mixture,
            inputs,
            aborted=output.finish_reason == "abort",
        )
