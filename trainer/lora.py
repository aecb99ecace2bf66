"""Initializes, merges, scales and saves LoRA adapters."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import xxhash

from protocol.host.atomic_file import directory_written_aside
from protocol.weights.lora import AdapterTarget, LoraConfig
from protocol.weights.peft import CONFIG, TENSORS, target_modules
from trainer.storage.checksums import write_checksums

Named = Iterable[tuple[str, torch.Tensor]]


class AdapterSwitch:
    """Base class of adapter modules, with the switches of `without_adapters` and `with_dropout`."""

    is_on: bool = True
    """Whether the adapters' output is added to the layer's output."""
    dropout: float = 0.0
    """Probability of zeroing an element of the adapters' input."""

    def dropped(self, x: torch.Tensor, rank: int = 0, ranks: int = 1) -> torch.Tensor:
        """Return the input of an adapter after dropout, by torch's global random generator.

        With several ranks, each rank has its columns of the input; all ranks draw the mask of the whole
        input.
        """
        if not self.dropout:
            return x
        if ranks == 1:
            return F.dropout(x, self.dropout)
        mask = F.dropout(x.new_ones(*x.shape[:-1], ranks * x.shape[-1]), self.dropout)
        return x * mask.narrow(-1, rank * x.shape[-1], x.shape[-1])


@contextmanager
def with_dropout(model: torch.nn.Module, config: LoraConfig, place: tuple[int, int, int]) -> Iterator[None]:
    """Enable dropout of adapter inputs within the block, a training pass.

    The masks follow from `place` and the computation in the block. Activation checkpoints save the state of
    torch's random generator, so recomputed activations use the same masks.

    Args:
        place: `trainer.seed`, number of previous updates, and index of the rank among the ranks that draw
            separate masks.
    """
    if not config.dropout:
        yield
        return
    torch.manual_seed(mask_seed(*place))
    switches = [module for module in model.modules() if isinstance(module, AdapterSwitch)]
    for switch in switches:
        switch.dropout = config.dropout
    try:
        yield
    finally:
        for switch in switches:
            switch.dropout = 0.0


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Make a model compute exactly as its frozen base within the block, bit for bit."""
    switches = [module for module in model.modules() if isinstance(module, AdapterSwitch)]
    for switch in switches:
        switch.is_on = False
    try:
        yield
    finally:
        for switch in switches:
            switch.is_on = True


def mask_seed(seed: int, update: int, rank: int) -> int:
    """Return the seed of torch's random generator at the start of an update's passes."""
    return xxhash.xxh3_64_intdigest(f"{seed} {update} {rank}".encode()) % 2**63


def initial_adapter(target: AdapterTarget, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial A and B of a weight, float32: A uniform within 1 / sqrt(in) as in PEFT, B zero.

    The initial model is therefore unchanged. The values are independent of the ranks' layout.
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
    """Return the initial A and B of all adapters, float32: random, or from `config.path`.

    `check_peft` has already validated the adapter in `config.path`.
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
    """Yield the exported tensors as engines expect them: B times the scaling, other tensors unchanged."""
    scaled = {target.b for target in targets}
    for name, tensor in tensors:
        yield name, tensor * config.scaling if name in scaled else tensor


def save_adapter(tensors: Named, directory: Path, config: LoraConfig, base: Path) -> None:
    """Write an adapter directory for PEFT, vLLM and SGLang, atomically.

    Args:
        tensors: A and B, not scaled, on the rank that writes.
        directory: target, replaced if it exists.
        base: directory of the base model.
    """
    with directory_written_aside(directory) as aside:
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        safetensors.torch.save_file(copies, aside / TENSORS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(peft_config(config, base, copies), indent=2))
        write_checksums(aside)


def peft_config(config: LoraConfig, base: Path, names: Iterable[str]) -> dict[str, object]:
    """Return the content of adapter_config.json for the base model in `base` and adapter tensors `names`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "target_modules": target_modules(names),
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
