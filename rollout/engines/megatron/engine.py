"""Serves megatron-core's GPTModel with a paged KV cache, in this process, on CPU or GPU.

Log-probabilities are computed by the layers that training uses. Incoming requests join running ones at the
next step. Several tensor-parallel ranks run in separate processes (`ranks.py`); a single rank may decode with
CUDA graphs. Weights arrive through a transport, or the trainer shares the live weights.
"""

import logging
from dataclasses import replace

import numpy as np
import torch

from protocol.errors import EngineError, EngineSettingsError, SettingsError
from rollout.engines.base import EngineConfig, Occupancy
from rollout.engines.in_process.engine import InProcessEngine, LoadedModel
from rollout.engines.megatron.decoder import PagedDecoder
from rollout.engines.megatron.rank import EXPERTS, TensorRankSettings
from rollout.engines.megatron.ranks import RankedModel
from rollout.engines.multi_process.rank_rpc import MAX_VALUE
from rollout.engines.named_adapters import named_tensors
from rollout.engines.requests import check_adapters, check_fits, read_config
from rollout.staging.places import StagingRoom
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.shared_weights import SharedStaging, describe, share_parameters
from rollout.staging.staging import digest_of, whole_source
from rollout.staging.staging_plan import trace
from trainer.megatron.families.experts import Experts
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.inference.graphs import graph_refusal
from trainer.megatron.inference.model import CachedModel

log = logging.getLogger("tether.rollout")
DEFAULT_BATCH_TOKENS = 8192
"""Default maximum tokens of a forward pass, including padding."""


class MegatronEngine(InProcessEngine):
    """Engine for the model families supported by the trainer backend `megatron`.

    Without weights in the model directory, weights are random.
    """

    _cached_model: CachedModel | None = None
    _ranked: RankedModel | None = None
    _decoder: PagedDecoder | None = None

    async def check(self) -> None:
        await super().check()
        if self._ranked is not None and self._ranked.processes.ended:
            raise EngineError(f"engine {self._name}: {self._ranked.processes.ended}")

    async def occupancy(self) -> Occupancy:
        await self.check()
        assert self._decoder is not None
        return Occupancy(self._decoder.running, self._decoder.use)

    def _load(self) -> LoadedModel:
        config, batch_tokens = self._config, _batch_tokens(self._config)
        check_fits(config, read_config(self._model_dir), self._model_dir)
        check_adapters(self._lora, self._model_dir)
        if config.tensor_parallel_size > 1:
            return self._load_ranks(batch_tokens)
        try:
            model = self._cached_model = CachedModel(
                self._model_dir,
                dtype=config.dtype,
                running=config.max_running,
                length=config.max_model_len,
                buffer_bytes=int(config.buffer_size_gb * 2**30),
                records_experts=config.enable_return_routed_experts,
                adapters=self._lora,
                named=named_tensors(self._named, self._model_dir),
            )
        except SettingsError as error:
            raise EngineSettingsError(f"engine megatron: {error}") from error
        except RuntimeError as error:
            raise EngineError(
                f"engine megatron cannot load {self._model_dir} with a KV cache for {config.max_running} "
                f"requests of {config.max_model_len} tokens; lower max_running or set buffer_size_gb: {error}"
            ) from error
        if not torch.cuda.is_available():
            torch.set_num_threads(config.threads)
        model.graphs.on = _uses_graphs(config, model.architecture)
        decoder = self._decoder = PagedDecoder(model, batch_tokens)
        if self._shared is not None:
            self._shared_memory, buffers = share_parameters(model.module, model.buffers())
            describe(self._shared_memory, self._shared, model.base, buffers)
            if not self._lora.rank:
                return _sharing(model, decoder)
        dtype, room = getattr(torch, config.dtype), StagingRoom(config.staging, config.staging_mb)
        plan = trace(model.load, model.parameters.items(), model.shapes, dtype, room)
        plan.calibrate()
        staging = plan.staging(architecture=model.architecture.name, tied=model.architecture.tied)
        lost = [*plan.live.values(), *plan.releasable, *model.cache.tensors]
        memory = None if self._shared else ReleasableMemory(lost, model.base.values(), model.graphs.drop)
        return LoadedModel(
            decoder,
            plan,
            staging,
            lambda: staging.live_digest((name, tensor) for name, tensor, _ in plan.gathered()),
            memory,
        )

    def _load_ranks(self, batch_tokens: int) -> LoadedModel:
        config = self._config
        try:
            architecture = read_architecture(self._model_dir)
        except SettingsError as error:
            raise EngineSettingsError(f"engine megatron: {error}") from error
        _uses_graphs(config, architecture)  # only logs why tensor ranks use no graphs
        if config.enable_return_routed_experts:
            _check_answer(batch_tokens, architecture.experts, architecture.layers)
        model = self._ranked = RankedModel(
            config,
            TensorRankSettings(
                model_dir=str(self._model_dir),
                dtype=config.dtype,
                running=config.max_running,
                length=config.max_model_len,
                buffer_bytes=int(config.buffer_size_gb * 2**30),
                records_experts=config.enable_return_routed_experts,
                adapters=self._lora,
                named={name: str(path) for name, path in self._named.items()},
                staging=StagingRoom(config.staging, config.staging_mb),
                shared=str(self._shared or ""),
                threads=max(1, config.threads // config.tensor_parallel_size),
                start_timeout_s=config.start_timeout_s,
            ),
            architecture,
            self._name,
            self._loop,
        )
        decoder = self._decoder = PagedDecoder(model, batch_tokens)
        memory = model if self._shared is None else None
        return LoadedModel(decoder, model, model.staging, model.digest, memory)

    def _unload(self) -> None:
        super()._unload()
        if self._cached_model is not None:
            self._cached_model.close()
        if self._ranked is not None:
            self._ranked.close()


def _sharing(model: CachedModel, decoder: PagedDecoder) -> LoadedModel:
    """Return a model whose versions are converted from the trainer's masters."""
    parts = {name: part for name, (_, part) in model.slices().items()}
    sources = {name: replace(whole_source(part), shape=model.shapes[name]) for name, part in parts.items()}
    staging = SharedStaging(sources, architecture=model.architecture.name, tied=model.architecture.tied)
    return LoadedModel(
        decoder,
        staging,
        staging,
        lambda: digest_of({name: part.reshape(model.shapes[name]) for name, part in parts.items()}),
    )


def _uses_graphs(config: EngineConfig, architecture: Architecture) -> bool:
    """Return whether decode steps are padded for CUDA graphs; log why no graphs will be captured."""
    if config.enforce_eager:
        return False
    dtype, records = getattr(torch, config.dtype), config.enable_return_routed_experts
    reason = graph_refusal(architecture, dtype, records, config.tensor_parallel_size)
    if reason or not torch.cuda.is_available():
        log.warning("engine.eager reason=%r", reason or "there is no GPU")
    return not reason


def _check_answer(batch_tokens: int, experts: Experts, layers: int) -> None:
    """Check that the experts of one forward pass fit into a rank's answer.

    Raises:
        EngineSettingsError: a pass has too many tokens; the message names the settings that determine the
            number.
    """
    each = experts.sparse_layers_before(layers) * experts.per_token * np.dtype(EXPERTS).itemsize
    if batch_tokens * each > MAX_VALUE:
        raise EngineSettingsError(
            f"engine megatron: max_model_len and max_batch_tokens give passes of {batch_tokens} tokens; with "
            f"enable_return_routed_experts and tensor ranks at most {MAX_VALUE // each}: lower them"
        )


def _batch_tokens(config: EngineConfig) -> int:
    """Return the maximum tokens of a forward pass.

    Raises:
        EngineSettingsError: a setting is invalid for this engine; the message names it.
    """
    if config.buffer_size_gb < 0:
        raise EngineSettingsError(
            f"engine megatron: buffer_size_gb is {config.buffer_size_gb}, must be 0 or more"
        )
    min_batch_tokens = max(config.max_model_len, config.max_running)
    if config.max_batch_tokens and config.max_batch_tokens < min_batch_tokens:
        raise EngineSettingsError(
            f"engine megatron: max_batch_tokens is {config.max_batch_tokens}; a pass must hold max_model_len "
            f"tokens of a prompt and one for each of max_running requests, so at least {min_batch_tokens}"
        )
    return config.max_batch_tokens or max(DEFAULT_BATCH_TOKENS, min_batch_tokens)
