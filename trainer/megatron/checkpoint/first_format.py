"""Restores checkpoints of the first format, in the layout that they were saved in.

Files of a directory:
    layout.json                        model, sizes, dtype
    model-tp0-pp0.safetensors          trained parameters by megatron name
    optimizer-tp0-pp0-dp0.safetensors  moments, steps, masters, random states, each tensor named by the
                                       optimizer, group and position that it has there
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.reading import check_model, listed
from trainer.megatron.optimizer import Optimizer

STATE = ("exp_avg", "exp_avg_sq", "step")
"""Adam's state of a parameter."""


def restore_first_format(
    directory: Path,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    model: TrainedModel,
    rank: int,
    saved: Mapping[str, Any],
) -> None:
    """Load this rank's part; arguments as those of `restore_part`.

    Args:
        directory: the checkpoint.
        parameters: what is written; nothing if the parameters are not.
        optimizer: holds masters and moments.
        model: what is trained now.
        rank: this process's.
        saved: what the checkpoint says of itself.

    Raises:
        SettingsError: the checkpoint is of another layout or model, or incomplete; nothing changed.
    """
    check_model(directory, saved, model)
    _check_layout(directory, saved, model)
    place = model.layout.place_of(rank)
    dp = place.dp if model.distributed else 0
    files = (
        directory / f"model-tp{place.tp}-pp{place.pp}.safetensors",
        directory / f"optimizer-tp{place.tp}-pp{place.pp}-dp{dp}.safetensors",
    )
    for path in files:
        if not path.exists():
            raise SettingsError(f"the checkpoint lacks {path}: it is incomplete")
    weights = load_file(files[0])
    if parameters and set(weights) != set(parameters):
        raise SettingsError(
            f"{files[0]} holds other parameters than the model: {sorted(set(weights) ^ set(parameters))[:5]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    tensors = load_file(files[1])
    for index, inner in enumerate(optimizer.torch_optimizers):
        _restore_optimizer(inner, f"optimizer.{index}", tensors)
    optimizer.steps = int(tensors["steps"])
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _check_layout(directory: Path, saved: Mapping[str, Any], model: TrainedModel) -> None:
    layout = model.layout
    wanted = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "data_parallel_size": layout.dp,
        "distributed_optimizer": model.distributed,
        "dtype": model.dtype,
    }
    different = {key: (saved.get(key), value) for key, value in wanted.items() if saved.get(key) != value}
    others = {"context": layout.cp, "expert": layout.ep, "expert-tensor": layout.etp, "chunks": layout.chunks}
    different |= {f"{name} size": (1, size) for name, size in others.items() if size != 1}
    if len({sum(map(len, chunks)) for chunks in layout.stages}) > 1:
        different["layers of the stages"] = "equal", "unequal"
    if different:
        raise SettingsError(
            f"{directory}: a checkpoint of an older release is restored in its own layout only: "
            f"{listed(different)}. Resume with that layout; the next checkpoint can be restored in any"
        )


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
