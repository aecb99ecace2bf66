"""Serves a transformers model in this process, on CPU or GPU; a simple reference engine, not a fast one."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.device.hf_models import MODEL_BUILDING, apply_config, code_trust
from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.lora import LoraConfig, adapter_targets
from rollout.engines.base import EngineConfig
from rollout.engines.hf.decoder import decoder_of
from rollout.engines.hf.routed_experts import ExpertRecorder
from rollout.engines.hf.row_adapters import RowAdapters
from rollout.engines.in_process.engine import InProcessEngine, LoadedModel
from rollout.engines.in_process.merged_staging import MergedStaging
from rollout.engines.in_process.running_request import Decoder
from rollout.engines.named_adapters import read_named
from rollout.engines.requests import check_adapters
from rollout.staging.layers import LayeredStaging
from rollout.staging.places import StagingPlace, StagingRoom, allocate_copies, choose_place
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.shared_weights import SharedStaging, describe, share_parameters
from rollout.staging.staging import Committable, LiveAndStaged, Staging, digest_of, stored_once, whole_source


class HFEngine(InProcessEngine):
    """Engine for every model that `AutoModelForCausalLM` loads.

    Without weights in the model directory, weights are random. Versions contain tensors in the checkpoint's
    layout, not in transformers' internal layout.
    """

    def _load(self) -> LoadedModel:
        if self._config.tensor_parallel_size != 1:
            raise EngineSettingsError(
                f"engine hf: tensor_parallel_size is {self._config.tensor_parallel_size}, only 1 is supported"
            )
        check_adapters(self._lora, self._model_dir)
        model = load_model(self._model_dir, self._config)
        if self._shared is not None:
            return self._share(model, self._shared)
        live = model_tensors(model)
        weights, staging, memory = _staging(
            model, live, self._lora, StagingRoom(self._config.staging, self._config.staging_mb)
        )

        def digest() -> int:
            # copy first: the digest uses NumPy, and a storage that NumPy has viewed can never be released
            found = (
                {name: live[name] for name in staging.copy}
                if isinstance(staging, MergedStaging)
                else checkpoint_views(model, live)
            )
            return staging.live_digest(
                (name, tensor.clone(memory_format=torch.contiguous_format)) for name, tensor in found.items()
            )

        return LoadedModel(self._decoder(model), weights, staging, digest, memory)

    def _share(self, model: Any, path: Path) -> LoadedModel:
        self._shared_memory, buffers = share_parameters(model, dict(model.named_buffers()))
        live = stored_once(model.named_parameters())
        describe(self._shared_memory, path, live, buffers)
        sources = {name: whole_source(tensor) for name, tensor in live.items()}
        staging = SharedStaging(sources, architecture=type(model).__name__, tied=_is_tied(model))
        return LoadedModel(self._decoder(model), staging, staging, lambda: digest_of(live))

    def _decoder(self, model: Any) -> Decoder:
        recorder = ExpertRecorder(model) if self._config.enable_return_routed_experts else None
        found = read_named(self._named, self._model_dir)
        adapters = RowAdapters(model, found.values()) if found else None
        return decoder_of(model, row_by_row=self._config.batch_invariant)(model, recorder, adapters)


def _staging(
    model: Any, live: dict[str, torch.Tensor], lora: LoraConfig, room: StagingRoom
) -> tuple[Committable, Staging, ReleasableMemory]:
    """Return (committer, staging, releasable memory) of a model."""
    architecture = type(model).__name__
    if lora.rank:
        targets = adapter_targets({name: tuple(tensor.shape) for name, tensor in live.items()}, lora)
        updated = {target.weight: live[target.weight] for target in targets}
        choose_place(StagingRoom(mb=room.mb), updated.values(), 0)
        merging = MergedStaging(
            targets,
            lora.rank,
            base={name: tensor.clone() for name, tensor in updated.items()},
            copy={name: torch.empty_like(tensor) for name, tensor in updated.items()},
            architecture=architecture,
        )
        lost = [*updated.values(), *merging.copy.values(), *merging.adapter.values()]
        return (
            LiveAndStaged(updated, merging.copy),
            merging,
            ReleasableMemory(lost, kept=[*live.values(), *merging.base.values()]),
        )
    place = choose_place(room, live.values(), max(tensor.nbytes for tensor in live.values()))
    if place == StagingPlace.LAYERS:
        sources = {name: whole_source(view) for name, view in checkpoint_views(model, live).items()}
        layers = LayeredStaging(sources, architecture=architecture, tied=_is_tied(model))
        return layers, layers, ReleasableMemory([*live.values(), layers.buffer.memory])
    copy = allocate_copies(place, live)
    sources = {name: whole_source(view) for name, view in checkpoint_views(model, copy).items()}
    staging = Staging(sources, architecture=architecture, tied=_is_tied(model))
    released = [*live.values(), *(copy.values() if place == StagingPlace.DEVICE else ())]
    return LiveAndStaged(live, copy), staging, ReleasableMemory(released)


def _is_tied(model: Any) -> bool:
    """Return whether input and output embeddings are tied."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def load_model(model_dir: Path, config: EngineConfig) -> Any:
    """Load a model for generation. Raises EngineError, or EngineSettingsError with the setting's name."""
    dtype = getattr(torch, config.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineSettingsError(f"engine hf: dtype {config.dtype!r} is not known")
    try:
        with MODEL_BUILDING:
            if any(model_dir.glob("*.safetensors")):
                model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, **code_trust())
            else:
                model_config = AutoConfig.from_pretrained(model_dir, **code_trust())
                model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, **code_trust())
    except (OSError, ValueError, KeyError) as error:
        raise EngineSettingsError(f"engine hf cannot load {model_dir}: {error}") from error
    except RuntimeError as error:  # for example out of memory, which may be transient
        raise EngineError(f"engine hf cannot load {model_dir}: {error}") from error
    apply_config(model)
    if not torch.cuda.is_available():
        torch.set_num_threads(config.threads)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():  # memory-mapped from the file: could not be released
            tensor.data = tensor.data.clone()
    return model
