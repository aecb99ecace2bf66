"""Serves with sglang-jax: the model computes in a child process; this one batches, samples and stages.

sglang-jax needs Python 3.12 and versions of its own of most libraries, so `engine.python` names an
interpreter that has it. Its scheduler and its sampler are not used: release 0.0.2 returns no
log-probabilities, and cannot take new weights.
"""

from dataclasses import replace
from pathlib import Path

import torch

from protocol.errors import EngineError
from rollout.engines.base import Capabilities, EngineConfig, Occupancy
from rollout.engines.in_process.engine import InProcessEngine, LoadedModel
from rollout.engines.requests import read_config
from rollout.engines.sglang_jax.child import ModelProcess
from rollout.engines.sglang_jax.model_check import check_interpreter, check_model, config_overrides, slots_of
from rollout.engines.sglang_jax.slot_decoder import SlotDecoder
from rollout.staging.places import StagingRoom, choose
from rollout.staging.staging import Staging, whole_source

BATCH_TOKENS = 2048
"""Tokens of one forward pass of prompts; its attention takes memory with their square."""


class SglangJaxEngine(InProcessEngine):
    """Engine for the families that sglang-jax has, on a CPU.

    A model directory without weights gives a model with random ones.
    """

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        """Create an engine that is not started; the arguments are as in `make_engine`."""
        super().__init__(config, model_dir, incarnation)
        self.capabilities = Capabilities(sleep=True)
        self._child: ModelProcess | None = None

    async def check(self) -> None:
        await super().check()
        if self._child is not None and self._child.ended:
            raise EngineError(f"engine {self._name}: {self._child.ended}")

    def _load(self) -> LoadedModel:
        model = read_config(self._model_dir)
        check_model(self._config, model, self._model_dir)
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
        dtype = getattr(torch, self._config.dtype)
        choose(
            StagingRoom(mb=self._config.staging_mb),
            (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes.values()),
            0,
        )
        staged = child.share(shapes, dtype, slots, self._vocab)
        staging = Staging(
            {name: whole_source(tensor) for name, tensor in staged.items()},
            architecture=model["architectures"][0],
            tied="lm_head.weight" not in staged,
        )
        decoder = SlotDecoder(child, max(BATCH_TOKENS, self._config.max_model_len))
        return LoadedModel(decoder, child, staging, child.digest, child)

    async def occupancy(self) -> Occupancy:
        found = await super().occupancy()
        # a slot each, as many as there are
        return replace(found, kv_use=(found.running or 0) / self._config.max_running)

    def _unload(self) -> None:
        if self._child is not None:
            self._child.close()
