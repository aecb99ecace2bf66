"""Reads and writes adapters in PEFT's format, which an engine serves by name.

Versions do not change these adapters. A request names one, or none for the base model.
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
    """Adapter in a directory, checked against the model."""

    name: str
    directory: Path
    config: LoraConfig
    """Rank, scaling and target modules from the directory."""
    targets: tuple[AdapterTarget, ...]

    def pairs(self, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return weight name -> (A, B times scaling), in `dtype`, on the host."""
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

    Raises:
        SettingsError: an adapter cannot be read, is of an unsupported kind, or does not fit the model.
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
    """Write an adapter in PEFT's format to an existing directory.

    `lora_alpha` equals the rank, because B of published adapters already includes the scaling.

    Args:
        tensors: PEFT name -> A or scaled B.
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
    """Return (settings, PEFT name -> A or scaled B) of each adapter. Raises: see `read_named`."""
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
    """Return settings with the largest rank and the union of the target modules."""
    found = list(configs)
    rank = max(config.rank for config in found)
    layers = sorted({layer for config in found for layer in config.target_modules})
    return as_scaled(LoraConfig(rank, target_modules=tuple(layers)))
