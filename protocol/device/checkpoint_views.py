"""Shows the tensors of a transformers model as its checkpoint has them: other names, experts one by one.

transformers joins the experts of a layer when it loads a checkpoint, and takes them apart when it saves one.
What takes them apart runs here without its copies, so that every tensor of the checkpoint is a view.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.errors import SettingsError


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's checkpoint by the model's own names: parameters and persistent buffers.

    Tied parameters occur once.
    """
    saved = model.state_dict().keys()
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def checkpoint_views(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of tensors under the names, and in the shapes, that the model's checkpoint gives them.

    Args:
        model: of transformers.
        tensors: by the model's own names, laid out as in the model: its own, or copies of them.

    Returns: views that have every element of `tensors` once, and need not be contiguous; in the order of
        `tensors` where the names are the same.

    Raises:
        SettingsError: a tensor of the checkpoint is no view of the model's.
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
            f"checkpoint's tensor {names[0]} is no part of a parameter in transformers"
        )
    return {name: views[name] for name in tensors} if views.keys() == tensors.keys() else views


class _WithoutCopies(TorchDispatchMode):
    """Dispatch mode in which a copy of a tensor is the tensor itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:  # of what was copied in order to be viewed so
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))
