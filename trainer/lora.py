"""Makes, merges, scales and saves the tensors of adapters."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import xxhash

from protocol.host.atomic_file import directory_written_aside
from protocol.weights.lora import AdapterTarget, LoraConfig
from protocol.weights.peft import CONFIG, TENSORS, target_modules
from trainer.storage.checksums import write_checksums

Named = Iterable[tuple[str, torch.Tensor]]


class AdapterSwitch:
    """Mark of a layer's adapters, which `without_adapters` turns off."""

    is_on: bool = True
    """Whether their output is added to the layer's."""


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Have a model compute as its frozen base does within the block: the same bits as without adapters."""
    switches = [module for module in model.modules() if isinstance(module, AdapterSwitch)]
    for switch in switches:
        switch.is_on = False
    try:
        yield
    finally:
        for switch in switches:
            switch.is_on = True


def initial_adapter(target: AdapterTarget, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial A and B of a weight, float32: A uniform within 1 / sqrt(in) as in PEFT, B zero.

    So the model begins unchanged. The bits do not depend on the layout of the ranks.
    """
    out, width = target.shape
    generator = torch.Generator().manual_seed(
        (xxhash.xxh3_64_intdigest(target.weight.encode()) ^ seed) % 2**63
    )
    a = torch.empty(rank, width).uniform_(-1 / math.sqrt(width), 1 / math.sqrt(width), generator=generator)
    return {target.a: a, target.b: torch.zeros(out, rank)}


def initial_adapters(
    targets: Iterable[AdapterTarget], config: LoraConfig, seed: int
) -> dict[str, torch.Tensor]:
    """Return the A and B that training starts from, float32: random ones, or those in `config.path`.

    `check_peft` has found the latter to be there.
    """
    adapters: dict[str, torch.Tensor] = {}
    if not config.path:
        for target in targets:
            adapters |= initial_adapter(target, config.rank, seed)
        return adapters
    with safetensors.safe_open(str(Path(config.path) / TENSORS), framework="pt") as file:
        for target in targets:
            adapters |= {name: file.get_tensor(name).float() for name in (target.a, target.b)}
    return adapters


def merged(
    target: AdapterTarget, weight: torch.Tensor, adapter: Mapping[str, torch.Tensor], config: LoraConfig
) -> torch.Tensor:
    """Return W + scaling B A, computed in float32, in the dtype and on the device of `weight`."""
    a, b = (adapter[name].to(weight.device, torch.float32) for name in (target.a, target.b))
    return (weight.float() + config.scaling * (b @ a)).to(weight.dtype)


def as_published(
    tensors: Named, targets: Iterable[AdapterTarget], config: LoraConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the exported tensors as engines expect them: B multiplied by the scaling, others unchanged."""
    scaled = {target.b for target in targets}
    for name, tensor in tensors:
        yield name, tensor * config.scaling if name in scaled else tensor


def save_adapter(tensors: Named, directory: Path, config: LoraConfig, base: Path) -> None:
    """Write a directory that PEFT, vLLM and SGLang load, so that it is complete or not there.

    Args:
        tensors: A and B, not scaled; on the rank that writes.
        directory: replaced if it exists.
        config: rank, alpha and target modules.
        base: directory of the model that the adapter belongs to.
    """
    with directory_written_aside(directory) as aside:
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        safetensors.torch.save_file(copies, aside / TENSORS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(peft_config(config, base, copies), indent=2))
        write_checksums(aside)


def peft_config(config: LoraConfig, base: Path, names: Iterable[str]) -> dict[str, object]:
    """Return the content of adapter_config.json for the model in `base`, with tensors of these names."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "target_modules": target_modules(names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
