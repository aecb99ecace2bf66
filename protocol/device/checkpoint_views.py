"""Views the tensors of a transformers model under the names and shapes of its checkpoint.

transformers merges the experts of a layer when it loads a checkpoint, and splits them when it saves one. This
module runs the split without copies, so every checkpoint tensor is a view.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.errors import SettingsError


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, under the model's own names.

    Tied parameters occur once.
    """
    saved = model.state_dict().keys()
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def checkpoint_views(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of tensors under the names and in the shapes of the model's checkpoint.

    Args:
        model: a transformers model.
        tensors: name in the model -> tensor, laid out as in the model: its own tensors or copies.

    Returns:
        Views that contain every element of `tensors` once and may be non-contiguous. In the order of
        `tensors` if the names are the same.

    Raises:
        SettingsError: a tensor of the checkpoint is not a view of the model's tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad(), _WithoutCopies():
        views: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    memory = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    computed = [name for name, view in views.items() if view.untyped_storage()._cdata not in memory]
    counts = [sum(tensor.numel() for tensor in some.values()) for some in (tensors, views)]
    if computed or counts[0] != counts[1]:
        names = computed or sorted(views.keys() - tensors.keys()) or ["?"]
        raise SettingsError(
            f"a model of type {model.config.model_type!r} can be neither published nor updated: its "
            f"checkpoint's tensor {names[0]} is not part of a parameter in transformers"
        )
    return {name: views[name] for name in tensors} if views.keys() == tensors.keys() else views


class _WithoutCopies(TorchDispatchMode):
    """Dispatch mode in which cloning a tensor returns the tensor itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:  # a view of a tensor that was cloned for contiguity
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))
