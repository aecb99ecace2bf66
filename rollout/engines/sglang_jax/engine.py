"""Serves with sglang-jax: a child process runs the model; this process batches, samples and stages.

sglang-jax needs Python 3.12 and its own versions of most libraries, so `engine.python` names an interpreter
that has it. Its scheduler and sampler are not used: release 0.0.2 returns no log-probabilities and cannot
update weights.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from protocol.errors import EngineError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_targets
from rollout.engines.base import EngineConfig, Occupancy
from rollout.engines.in_process.engine import InProcessEngine, LoadedModel
from rollout.engines.in_process.merged_staging import MergedStaging
from rollout.engines.requests import check_adapters, read_config
from rollout.engines.sglang_jax.child import ModelProcess
from rollout.engines.sglang_jax.model_check import check_interpreter, check_model, config_overrides, slots_of
from rollout.engines.sglang_jax.slot_decoder import SlotDecoder
from rollout.staging.loaded_weights import files_by_tensor
from rollout.staging.places import StagingRoom, choose_place
from rollout.staging.staging import Staging, whole_source

BATCH_TOKENS = 2048
"""Maximum tokens of a prefill pass; attention memory grows with their square."""


class SglangJaxEngine(InProcessEngine):
    """Engine for the model families of sglang-jax, on CPU.

    Without weights in the model directory, weights are random. Release 0.0.2 does not support adapters, so a
    version's adapter is merged into the base weights.
    """

    def __init__(
        self, config: EngineConfig, model_dir: Path, incarnation: str, lora: LoraConfig = NO_ADAPTERS
    ) -> None:
        """Create an engine that is not started; arguments: see `make_engine`."""
        super().__init__(config, model_dir, incarnation, lora)
        self._child: ModelProcess | None = None

    async def check(self) -> None:
        await super().check()
        if self._child is not None and self._child.ended:
            raise EngineError(f"engine {self._name}: {self._child.ended}")

    def _load(self) -> LoadedModel:
        model = read_config(self._model_dir)
        check_model(self._config, model, self._model_dir)
        check_adapters(self._lora, self._model_dir)
        slots = slots_of(self._config, model)
        check_interpreter(self._config.python)
        self._config = replace(self._config, max_running=slots)
        child = self._child = ModelProcess(self._config, self._name, self._loop)
        shapes = child.load(
            str(self._model_dir),
            not any(self._model_dir.glob("*.safetensors")),
            self._config.dtype,
            config_overrides(model),
            slots,
            self._config.max_model_len,
        )
        staging = self._shared_staging(child, shapes, model["architectures"][0])
        decoder = SlotDecoder(child, max(BATCH_TOKENS, self._config.max_model_len))
        return LoadedModel(decoder, child, staging, child.digest, child)

    def _shared_staging(
        self, child: ModelProcess, shapes: dict[str, tuple[int, ...]], architecture: str
    ) -> Staging:
        """Share memory for the tensors that versions change, and return their staging."""
        targets = adapter_targets(shapes, self._lora) if self._lora.rank else ()
        changed = {target.weight: shapes[target.weight] for target in targets} or shapes
        dtype = getattr(torch, self._config.dtype)
        blank = (torch.empty(shape, dtype=dtype, device="meta") for shape in changed.values())
        choose_place(StagingRoom(mb=self._config.staging_mb), blank, 0)
        staged = child.share(changed, dtype, self._config.max_running, self._vocab)
        if targets:
            with ExitStack() as stack:
                files = files_by_tensor(stack, self._model_dir)
                base = {name: files[name].get_tensor(name).to(dtype) for name in staged}
            return MergedStaging(targets, self._lora.rank, base=base, copy=staged, architecture=architecture)
        sources = {name: whole_source(tensor) for name, tensor in staged.items()}
        return Staging(sources, architecture=architecture, tied="lm_head.weight" not in staged)

    async def occupancy(self) -> Occupancy:
        found = await super().occupancy()
        # each request uses one slot
        return replace(found, kv_use=(found.running or 0) / self._config.max_running)

    def _unload(self) -> None:
        if self._child is not None:
            self._child.close()
