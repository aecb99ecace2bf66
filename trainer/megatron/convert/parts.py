"""Views of parameters that are tensors of a checkpoint, and of an engine's tensors that are parameters."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from protocol.errors import SettingsError
from trainer.megatron.convert.reshard import TensorPlan, stretch


def parts_of(plans: Iterable[TensorPlan], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of whole parameters that are the tensors of a checkpoint, by name.

    Their shapes are as `matches_layout` says.

    Raises:
        SettingsError: a tensor is scattered over a parameter in unequal pieces or distances.
    """
    return {plan.name: _part(plan, parameters[plan.parameter].detach()) for plan in plans}


def parameters_in(
    plans: Iterable[TensorPlan], own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return views of an engine's memory that have the layout of whole parameters, by their names.

    Args:
        plans: of every tensor of the checkpoint.
        own: the parameters.
        engine: the engine's tensors by checkpoint name.

    Raises:
        SettingsError: naming the first tensor that the engine lacks, or does not have where the parameter has
            it.
    """
    found: dict[str, torch.Tensor] = {}
    for plan in plans:
        if plan.name not in engine:
            raise SettingsError(f"tensor {plan.name}: the trainer's model has it, the engine does not")
        parameter, tensor = own[plan.parameter].detach(), engine[plan.name]
        part = _part(plan, parameter)
        start = tensor.storage_offset() - part.storage_offset() + parameter.storage_offset()
        try:
            whole = found.setdefault(
                plan.parameter, tensor.as_strided(parameter.shape, parameter.stride(), start)
            )
            alike = _place(_part(plan, whole)) == _place(tensor)
        except RuntimeError:  # the engine's memory ends before such a parameter would
            alike = False
        if not alike:
            turns = f" alternates with others, in {part.shape[0]} turns," if part.ndim > tensor.ndim else ""
            raise SettingsError(
                f"tensor {plan.name}{turns or ' lies otherwise'} in the trainer's {plan.parameter}, not in "
                "the engine: the two cannot compute with one copy of it"
            )
    return found


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _part(plan: TensorPlan, parameter: torch.Tensor) -> torch.Tensor:
    first, *others = plan.pieces
    if not others:
        part: torch.Tensor = stretch(parameter, plan.dim, first.local_start, first.length, first.local_matrix)
        return part
    distances = {after.local_start - before.local_start for before, after in pairwise(plan.pieces)}
    if plan.dim or len(distances) > 1 or {piece.length for piece in others} != {first.length}:
        raise SettingsError(
            f"weights.transport 'shared': tensor {plan.name} does not lie in equal turns in {plan.parameter}"
        )
    turns = parameter.view(-1, distances.pop(), *parameter.shape[1:])
    return turns.narrow(1, first.local_start, first.length)
