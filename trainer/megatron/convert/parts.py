"""Maps between a rank's parameters and its parts of a checkpoint's tensors, as views without copies."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from protocol.errors import SettingsError
from protocol.weights.boxes import Box
from trainer.megatron.convert.export import adjacent, box_of_rows
from trainer.megatron.convert.reshard import TensorPlan, narrow_rows
from trainer.megatron.convert.rules import Segment
from trainer.megatron.layout import Layout, Place

Slices = dict[str, tuple[Box, torch.Tensor]]
"""Name of a tensor -> box, and view of the box in the layout that `matches_layout` requires."""


def slices_of(
    plans: Iterable[TensorPlan],
    parameters: Mapping[str, torch.Tensor],
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    place: Place = Place(),  # noqa: B008 (frozen)
) -> Slices:
    """Return a rank's parts of a checkpoint's tensors, by name.

    Args:
        plans: plans of the tensors.
        parameters: parameters of the rank.
        layout: layout of the model, of one pipeline stage.
        place: coordinates of the rank.

    Raises:
        SettingsError: a part is scattered over a parameter in unequal pieces or distances, or is not a box.
    """
    found: Slices = {}
    for plan in plans:
        pieces = _pieces(plan, layout, place)
        runs = adjacent(pieces)
        if len(runs) > 1:
            raise SettingsError(
                f"weights.transport 'shared': a rank has several parts of {plan.name} that do not follow "
                "each other"
            )
        found[plan.name] = (
            box_of_rows(plan, runs[0]),
            _part(plan, parameters[plan.parameter].detach(), pieces),
        )
    return found


def parameters_in(
    plans: Iterable[TensorPlan],
    own: Mapping[str, torch.Tensor],
    engine: Mapping[str, torch.Tensor],
    layout: Layout,
    place: Place,
) -> dict[str, torch.Tensor]:
    """Return views of an engine's memory as whole parameters, by parameter name.

    Args:
        plans: plans of every tensor of the checkpoint.
        own: parameters of this rank.
        engine: parts of tensors on the same rank of the engine, by checkpoint name.
        layout: layout of the model, of one pipeline stage.
        place: coordinates of the rank.

    Raises:
        SettingsError: the engine lacks a tensor, or stores it elsewhere than the parameter. The message names
            the first such tensor.
    """
    found: dict[str, torch.Tensor] = {}
    for plan in plans:
        if plan.name not in engine:
            raise SettingsError(f"tensor {plan.name}: the trainer's model has it, the engine does not")
        parameter, tensor, pieces = (
            own[plan.parameter].detach(),
            engine[plan.name],
            _pieces(plan, layout, place),
        )
        part = _part(plan, parameter, pieces)
        start = tensor.storage_offset() - part.storage_offset() + parameter.storage_offset()
        try:
            whole = found.setdefault(
                plan.parameter, tensor.as_strided(parameter.shape, parameter.stride(), start)
            )
            alike = _place(_part(plan, whole, pieces)) == _place(tensor)
        except RuntimeError:  # the engine's memory is too short for this parameter
            alike = False
        if not alike:
            if part.ndim > tensor.ndim:
                differs = f"is interleaved with others in {part.shape[0]} blocks"
            else:
                differs = "has another layout"
            raise SettingsError(
                f"tensor {plan.name} {differs} in the trainer's {plan.parameter}, unlike in the engine: they "
                "cannot share one copy of it"
            )
    return found


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _pieces(plan: TensorPlan, layout: Layout, place: Place) -> list[Segment]:
    number = layout.number_of(place, expert=plan.expert)
    return plan.on_rank(number)


def _part(plan: TensorPlan, parameter: torch.Tensor, pieces: Sequence[Segment]) -> torch.Tensor:
    first, *others = pieces
    if not others:
        part: torch.Tensor = narrow_rows(
            parameter, plan.dim, first.local_start, first.length, first.local_matrix
        )
        return part
    distances = {after.local_start - before.local_start for before, after in pairwise(pieces)}
    if plan.dim or len(distances) > 1 or {piece.length for piece in others} != {first.length}:
        raise SettingsError(
            f"weights.transport 'shared': tensor {plan.name} does not lie in equal turns in {plan.parameter}"
        )
    turns = parameter.view(-1, distances.pop(), *parameter.shape[1:])
    return turns.narrow(1, first.local_start, first.length)
