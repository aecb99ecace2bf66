"""Updates the LoRA adapter in vLLM's first slot in place; named adapters use the other slots.

vLLM loads an adapter once and copies it into tensors that its kernels read. An update stages and commits
these tensors like parameters. vLLM itself must never load or move an adapter again.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.named_adapters import NamedAdapter, write_peft
from rollout.engines.vllm.arguments import argument_names
from rollout.staging.places import StagingRoom
from rollout.staging.staging_plan import AnyPlan, trace

NAME = "policy"
NUMBER = 1
"""vLLM's `lora_int_id` of the adapter in versions."""
SLOT = 0


def lora_arguments(lora: LoraConfig, model_dir: Path, named: int = 0) -> dict[str, Any]:
    """Return AsyncEngineArgs' adapter arguments; empty without adapters.

    A slot has the next rank supported by vLLM's kernels, with zero padding. Layers without an adapter, such
    as experts, keep their normal kernels.

    Args:
        lora: adapter of the first slot.
        named: number of further adapters, one slot each.

    Raises:
        EngineSettingsError: the rank exceeds the largest supported rank.
    """
    if not lora.rank:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if lora.rank > ranks[-1]:
        raise EngineSettingsError(
            f"setting lora.rank: {lora.rank} is above {ranks[-1]}, the highest rank that vLLM supports"
        )
    slot = next(rank for rank in ranks if rank >= lora.rank)
    slots = 1 + named
    arguments = {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": slot}
    if "lora_target_modules" not in argument_names():  # older vLLM
        return arguments
    targets = adapter_targets(checkpoint_shapes(model_dir), lora)
    return {**arguments, "lora_target_modules": sorted({target.last for target in targets})}


def first_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], lora: LoraConfig, dtype: str
) -> Any:
    """Write a no-op adapter, and return its LoRARequest.

    Args:
        directory: existing empty directory.
        shapes: checkpoint name -> shape of the model's tensors.
        lora: adapter that versions contain.
    """
    from vllm.lora.request import LoRARequest

    targets = adapter_targets(shapes, lora)
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, shape in adapter_shapes(targets, lora.rank).items()
    }
    write_peft(directory, tensors, lora.rank)
    return LoRARequest(NAME, NUMBER, str(directory))


def named_request(adapter: NamedAdapter, number: int) -> Any:
    """Return the LoRARequest of a named adapter; `number` is its index from 0."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, NUMBER + 1 + number, str(adapter.directory.absolute()))


def trace_adapter(
    runner: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, staging_mb: int = 0
) -> AnyPlan:
    """Plan the staging of the first slot's tensors by tracing how vLLM fills it.

    Afterwards vLLM cannot fill the slot again.

    Args:
        runner: vLLM's model runner in a worker that has loaded the first adapter.
        shapes: name -> shape of the adapter's tensors.
        dtype: dtype of the adapter's tensors.
        staging_mb: see `EngineConfig`.

    Raises:
        EngineError: vLLM stores the adapter in an unknown way.
    """
    manager = runner.lora_manager._adapter_manager
    if manager.lora_index_to_id[SLOT] != NUMBER:
        raise EngineError(f"vLLM holds adapter {manager.lora_index_to_id[SLOT]} in the slot of ours")
    layers = {name: layer for name, layer in manager.modules.items() if _members(manager, name, shapes)}
    parameters: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        for part, member in enumerate(_members(manager, name, shapes)):
            if member:
                parameters |= {
                    f"{name}.a.{part}": layer.lora_a_stacked[part][: SLOT + 1],
                    f"{name}.b.{part}": layer.lora_b_stacked[part][: SLOT + 1],
                }

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(named)
        for name, layer in layers.items():
            pairs = [
                (tensors[f"{m}.lora_A.weight"], tensors[f"{m}.lora_B.weight"]) if m else (None, None)
                for m in _members(manager, name, shapes)
            ]
            layer.reset_lora = lambda index: None
            a, b = ([pair[side] for pair in pairs] for side in (0, 1))
            layer.set_lora(SLOT, *((a, b) if name in manager.packed_modules else (a[0], b[0])))
            for part, tensor in enumerate(a):
                if tensor is not None:  # ranks of the slot beyond the adapter's stay zero
                    layer.lora_a_stacked[part][SLOT, :, len(tensor) :].zero_()
                    layer.lora_b_stacked[part][SLOT, ..., len(tensor) :].zero_()

    plan = trace(load, parameters.items(), shapes, dtype, StagingRoom(mb=staging_mb))
    for layer in manager.modules.values():
        layer.set_lora = layer.reset_lora = _refuse
    return plan


def _members(manager: Any, name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the PEFT names of a layer's weights, "" for weights without an adapter.

    The list is empty if no weight has an adapter.
    """
    members = [f"base_model.model.{member}" for member in manager.packed_modules.get(name, [name])]
    found = [member if f"{member}.lora_A.weight" in shapes else "" for member in members]
    return found if any(found) else []


def _refuse(*unused: Any) -> None:
    raise EngineError("vLLM was about to load or drop an adapter: each must stay in its slot")
