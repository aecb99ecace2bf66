"""The reference engine: a transformers model in this process, on a CPU or a GPU. Clear rather than fast."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.errors import EngineError
from protocol.lora import NO_ADAPTERS, LoraConfig
from protocol.model_building import MODEL_BUILDING
from rollout.engines.base import Capabilities, EngineConfig
from rollout.engines.decoder import PaddingDecoder
from rollout.engines.memory import Memory, check_room
from rollout.engines.merging import MergedStaging
from rollout.engines.requests import check_adapters
from rollout.engines.staging import Staging, stored_once, whole_source
from rollout.engines.stepped import Model, SteppedEngine
from rollout.weights.registry import RECEIVERS


class HFEngine(SteppedEngine):
    """Serves what `AutoModelForCausalLM` loads. A model directory without weights gives a model with random ones."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str, lora: LoraConfig = NO_ADAPTERS) -> None:
        super().__init__(config, model_dir, incarnation)
        self._lora = lora
        self.capabilities = Capabilities(transports=frozenset(RECEIVERS), lora=True, sleep=True)

    def _load(self) -> Model:
        if self._config.tensor_parallel_size != 1:
            raise EngineError(f"engine hf: tensor_parallel_size is {self._config.tensor_parallel_size}, only 1 is supported")
        check_adapters(self._lora, self._model_dir)
        model = _load(self._model_dir, self._config)
        live = stored_once(model.named_parameters())
        updated, copy, staging, memory = _staging(model, live, self._lora, self._config.staging_mb)

        def checkpoint() -> dict[str, torch.Tensor]:
            # Copies: a digest is taken through numpy, and a storage that numpy has seen can never be given back again.
            return {name: tensor.clone() for name, tensor in updated.items()}

        return Model(PaddingDecoder(model), updated, copy, staging, checkpoint, memory)


def _staging(
    model: Any, live: dict[str, torch.Tensor], lora: LoraConfig, staging_mb: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Staging, Memory]:
    """The parameters that updates change, a copy of them, what fills the copy, and what sleep gives back."""
    architecture = type(model).__name__
    if lora.rank:
        merging = MergedStaging(live, lora, architecture=architecture, staging_mb=staging_mb)
        updated = {name: live[name] for name in merging.copy}
        lost = [*updated.values(), *merging.copy.values(), *merging.adapter.values()]
        return updated, merging.copy, merging, Memory(lost, kept=[*live.values(), *merging.base.values()])
    check_room(live.values(), staging_mb)
    copy = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    sources = {name: whole_source(tensor) for name, tensor in copy.items()}
    return live, copy, Staging(sources, architecture=architecture, tied=tied), Memory([*live.values(), *copy.values()])


def _load(model_dir: Path, config: EngineConfig) -> Any:
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"engine hf: dtype {config.dtype!r} is not known")
    try:
        with MODEL_BUILDING:
            if any(model_dir.glob("*.safetensors")):
                model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
            else:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise EngineError(f"engine hf cannot load {model_dir}: {error}") from error
    if not torch.cuda.is_available():
        torch.set_num_threads(config.threads)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():  # mapped from the file: it could not be given back
            parameter.data = parameter.data.clone()
    return model
