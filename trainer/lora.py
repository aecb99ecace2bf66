"""Adapters as tensors: how they begin, what they add to a weight, what is published of them, and PEFT's
directory of them."""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
import xxhash

from protocol.host.atomic_file import sync
from protocol.weights.lora import AdapterTarget, LoraConfig

Named = Iterable[tuple[str, torch.Tensor]]


def initial_adapter(target: AdapterTarget, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A uniform within 1 / sqrt(in) as in PEFT, B zero: the model begins as it is. Whatever the layout, the
    same bits; float32."""
    out, width = target.shape
    generator = torch.Generator().manual_seed(
        (xxhash.xxh3_64_intdigest(target.weight.encode()) ^ seed) % 2**63
    )
    a = torch.empty(rank, width).uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=generator)
    return {target.a: a, target.b: torch.zeros(out, rank)}


def merged(
    target: AdapterTarget, weight: torch.Tensor, adapter: Mapping[str, torch.Tensor], config: LoraConfig
) -> torch.Tensor:
    """W + scaling B A, computed in float32, in the dtype and on the device of `weight`."""
    a, b = (adapter[name].to(weight.device, torch.float32) for name in (target.a, target.b))
    return (weight.float() + config.scaling * (b @ a)).to(weight.dtype)


def as_published(
    tensors: Named, targets: Iterable[AdapterTarget], config: LoraConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """A, and B times the scaling."""
    scaled = {target.b for target in targets}
    for name, tensor in tensors:
        yield name, tensor * config.scaling if name in scaled else tensor


def save_adapter(tensors: Named, directory: Path, config: LoraConfig, base: Path) -> None:
    """Write a directory that PEFT, vLLM and SGLang load: written aside and renamed, so it is complete or not
    there.

    Args:
        tensors: A and B, not scaled; on the rank that writes.
        directory: replaced if it exists.
        base: directory of the model that the adapter belongs to.
    """
    aside = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
    safetensors.torch.save_file(copies, aside / "adapter_model.safetensors", metadata={"format": "pt"})
    (aside / "adapter_config.json").write_text(json.dumps(peft_config(config, base), indent=2))
    for path in (*aside.iterdir(), aside):
        sync(path)
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)
    sync(directory.parent)


def peft_config(config: LoraConfig, base: Path) -> dict[str, object]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
