"""Saves and restores a rank's part of a checkpoint as safetensors, with a description of the layout.

Files of a directory:
    layout.json                        model, sizes, dtype; by rank 0
    model-tp0-pp0.safetensors          trained parameters by megatron name; by the first data-parallel rank
    optimizer-tp0-pp0-dp0.safetensors  moments, steps, masters, random states; by each data-parallel rank if
                                       the optimizer is distributed, else by the first
    model-rank0.safetensors, optimizer-rank0.safetensors
                                       instead of these by every rank, if the model has experts, of which
                                       data-parallel ranks may have different ones

The state is read from and written into torch's optimizer itself: megatron's own checkpoint path of the
distributed optimizer refuses torch's AdamW on reload.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from trainer.megatron.architecture.experts import Experts
from trainer.megatron.architecture.latent import Latent
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.architecture.rope import Rope
from trainer.megatron.optimizer import Optimizer, is_distributed
from trainer.megatron.parallel import Position
from trainer.storage.host_state import HostCopies, HostState

FORMAT = 1
"""Version of these files."""
LAYOUT = "layout.json"
PARTS = {"rope": Rope, "local_rope": Rope, "latent": Latent, "experts": Experts}
"""Numbers of a model that are tables of their own."""
STATE = ("exp_avg", "exp_avg_sq", "step")
"""Adam's state of a parameter."""


def layout(architecture: Architecture, position: Position, dtype: str, lora: LoraConfig) -> dict[str, Any]:
    """Return what must be equal for a checkpoint to be restored, as plain JSON values."""
    parallel = position.config
    return {
        "format": FORMAT,
        "model": asdict(architecture),
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "distributed_optimizer": is_distributed(position),
        "dtype": dtype,
        "lora": asdict(lora) if lora.rank else None,
    }


def copy_part(
    copies: HostCopies,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    position: Position,
    description: dict[str, Any],
) -> HostState:
    """Return this rank's files, which the module's docstring lists, copied to host memory.

    Args:
        copies: makes the copies.
        parameters: trained parameters by megatron name.
        optimizer: holds masters and moments.
        position: this rank's place in the layout.
        description: what `layout` returns.
    """
    files: dict[str, Iterable[tuple[str, torch.Tensor]]] = {}
    by_rank = _is_by_rank(description)
    model_file, optimizer_file = _files(position, by_rank=by_rank)
    if position.dp == 0 or by_rank:
        files[model_file] = parameters.items()
    if position.dp == 0 or by_rank or is_distributed(position):
        files[optimizer_file] = _optimizer_tensors(optimizer).items()
    named = {(file, name): tensor for file, tensors in files.items() for name, tensor in tensors}
    copied = copies.copy_all((f"{file} {name}", tensor) for (file, name), tensor in named.items())
    tensors: dict[str, dict[str, torch.Tensor]] = {file: {} for file in files}
    for (file, name), copy in zip(named, copied.values(), strict=True):
        tensors[file][name] = copy
    is_first = position.rank == 0
    return HostState(tensors, texts={LAYOUT: json.dumps(description, indent=1)} if is_first else {})


def restore_part(
    directory: Path,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    position: Position,
    description: dict[str, Any],
) -> None:
    """Load the files of `copy_part`, bit for bit; arguments as those of `copy_part`.

    Raises:
        SettingsError: the checkpoint is of another layout or model, or incomplete; nothing changed.
    """
    _check_layout(directory, description)
    files = [directory / name for name in _files(position, by_rank=_is_by_rank(description))]
    for path in files:
        if not path.exists():
            raise SettingsError(f"the checkpoint lacks {path}: it is incomplete")
    saved = load_file(files[0])
    if set(saved) != set(parameters):
        raise SettingsError(
            f"{files[0]} holds other parameters than the model: {sorted(set(saved) ^ set(parameters))[:5]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    tensors = load_file(files[1])
    for index, inner in enumerate(optimizer.torch_optimizers):
        _restore_optimizer(inner, f"optimizer.{index}", tensors)
    optimizer.steps = int(tensors["steps"])
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _check_layout(directory: Path, description: dict[str, Any]) -> None:
    path = directory / LAYOUT
    try:
        saved = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(
            f"cannot read {path}: {error}: not a checkpoint of the megatron backend"
        ) from error
    saved = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1} | saved
    if isinstance(saved.get("model"), dict):
        saved["model"] = _with_defaults(saved["model"], Architecture)
        for name, kind in PARTS.items():
            if saved["model"][name] is not None:
                saved["model"][name] = _with_defaults(saved["model"][name], kind)
    current = json.loads(json.dumps(description))
    different = {key: (saved.get(key), value) for key, value in current.items() if saved.get(key) != value}
    if "model" in different:
        before, now = (values or {} for values in different.pop("model"))
        different |= {
            f"model.{key}": (before.get(key), value) for key, value in now.items() if before.get(key) != value
        }
    if different:
        text = "; ".join(
            f"{key} is {before!r} in the checkpoint and {now!r} in the run"
            for key, (before, now) in different.items()
        )
        raise SettingsError(
            f"{directory}: the checkpoint has another layout: {text}. Restore with the layout that it was "
            "saved in"
        )


def _with_defaults(saved: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with the default of those that an older release did not know."""
    known = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    plain = {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in known.items()
    }
    defaults: dict[str, Any] = json.loads(json.dumps(plain))
    return defaults | saved


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"random.cpu": torch.get_rng_state(), "steps": torch.tensor(optimizer.steps)}
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    for index, inner in enumerate(optimizer.torch_optimizers):
        for key, group, parameter in _members(inner, f"optimizer.{index}"):
            tensors[f"{key}.master"] = parameter.detach()
            state: dict[str, Any] = inner.state.get(parameter) or {}
            # TransformerEngine and Apex count steps by group.
            tensors |= {
                f"{key}.{name}": torch.as_tensor({**group, **state}[name])
                for name in STATE
                if name in state or name in group
            }
    return tensors


def _restore_optimizer(
    inner: torch.optim.Optimizer, prefix: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    for key, group, parameter in _members(inner, prefix):
        with torch.no_grad():
            parameter.copy_(tensors[f"{key}.master"])
        state = {name: tensors[f"{key}.{name}"] for name in STATE if f"{key}.{name}" in tensors}
        inner.state.pop(parameter, None)
        if "step" in group and "step" in state:
            group["step"] = int(state.pop("step"))
        if state:
            inner.state[parameter] = {
                name: value.clone()
                if name == "step" and not group.get("fused")
                else value.to(parameter.device, copy=True)
                for name, value in state.items()
            }


def _members(inner: torch.optim.Optimizer, prefix: str) -> list[tuple[str, dict[str, Any], torch.Tensor]]:
    """Return key, group and tensor of everything that an optimizer steps, in the order of the layout."""
    return [
        (f"{prefix}.{number}.{position}", group, parameter)
        for number, group in enumerate(inner.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


def _is_by_rank(description: Mapping[str, Any]) -> bool:
    return bool(description.get("model", {}).get("experts", {}).get("count"))


def _files(position: Position, *, by_rank: bool) -> tuple[str, str]:
    """Return the names of a rank's files of parameters and of optimizer state."""
    if by_rank:
        return f"model-rank{position.rank}.safetensors", f"optimizer-rank{position.rank}.safetensors"
    dp = position.dp if is_distributed(position) else 0
    return (
        f"model-tp{position.tp}-pp{position.pp}.safetensors",
        f"optimizer-tp{position.tp}-pp{position.pp}-dp{dp}.safetensors",
    )
