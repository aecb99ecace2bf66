"""Reads the adapters that an engine serves by name, from directories in PEFT's format, and writes such ones.

They do not change: versions bring none of them. A request names one, or none for the model itself.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineSettingsError
from protocol.weights.lora import AdapterTarget, LoraConfig, as_scaled
from protocol.weights.peft import CONFIG, TENSORS, read_peft, target_modules


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in a directory, which fits the model."""

    name: str
    directory: Path
    config: LoraConfig
    """Rank, scaling and target modules that the directory says."""
    targets: tuple[AdapterTarget, ...]

    def pairs(self, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return weight -> A and scaling B, in `dtype`, on the host."""
        tensors = safetensors.torch.load_file(self.directory / TENSORS)
        return {
            target.weight: (
                tensors[target.a].to(dtype),
                (tensors[target.b].float() * self.config.scaling).to(dtype),
            )
            for target in self.targets
        }


def read_named(adapters: Mapping[str, Path], model_dir: Path) -> dict[str, NamedAdapter]:
    """Return the adapters of a model by name.

    Args:
        adapters: name -> directory.
        model_dir: the model's directory.

    Raises:
        SettingsError: one cannot be read, is of a kind that no engine computes, or does not fit the model.
        EngineError: the model's tensors cannot be read.
    """
    if not adapters:
        return {}
    shapes = checkpoint_shapes(model_dir)
    found = {}
    for name, directory in adapters.items():
        config, targets = read_peft(directory, shapes, f"adapter {name!r}: {directory}")
        if inside := [target.weight for target in targets if "expert" in target.module]:
            raise EngineSettingsError(
                f"adapter {name!r}: {directory}: {inside[0]} is an expert's, which cannot have one here"
            )
        found[name] = NamedAdapter(name, directory, config, tuple(targets))
    return found


def write_peft(directory: Path, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write an adapter into a directory that exists, in PEFT's format.

    Its alpha is its rank, because B of the published adapters includes the scaling.

    Args:
        directory: the directory.
        tensors: A and scaling B by their PEFT names.
        rank: of the adapter.
    """
    safetensors.torch.save_file(dict(tensors), directory / TENSORS)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": target_modules(tensors),
        "bias": "none",
    }
    (directory / CONFIG).write_text(json.dumps(config))


def named_tensors(
    adapters: Mapping[str, str | Path], model_dir: Path
) -> dict[str, tuple[LoraConfig, dict[str, torch.Tensor]]]:
    """Return settings, and A and scaling B by their PEFT names, of each adapter; raises as `read_named`."""
    found = {}
    for name, adapter in read_named({name: Path(path) for name, path in adapters.items()}, model_dir).items():
        pairs = adapter.pairs(torch.float32)
        tensors = {
            tensor_name: tensor
            for target in adapter.targets
            for tensor_name, tensor in zip((target.a, target.b), pairs[target.weight], strict=True)
        }
        found[name] = as_scaled(adapter.config), tensors
    return found


def covering(configs: Iterable[LoraConfig]) -> LoraConfig:
    """Return the settings of an adapter with the rank and the layers of all of these."""
    found = list(configs)
    rank = max(config.rank for config in found)
    layers = sorted({layer for config in found for layer in config.target_modules})
    return as_scaled(LoraConfig(rank, target_modules=tuple(layers)))
