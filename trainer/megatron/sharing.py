"""Describes the memory of a model on one rank, so that another of its kind can compute with it."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from protocol.errors import SettingsError
from trainer.megatron.convert.reshard import TensorPlan, stretch
from trainer.megatron.model import PackedModel

FREQUENCIES = "rotary_pos_emb.inv_freq"
"""Name of the first rotary embedding's; the others have their number behind it."""


def parts_of(plans: Iterable[TensorPlan], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of whole parameters that are the tensors of a checkpoint, by name.

    Their shapes are as `matches_layout` says.

    Raises:
        SettingsError: a tensor is scattered over a parameter in unequal pieces or distances.
    """
    return {plan.name: _part(plan, parameters[plan.parameter].detach()) for plan in plans}


def buffers_of(model: PackedModel) -> dict[str, torch.Tensor]:
    """Return the model's buffers, with the rotary frequencies, which are attributes."""
    frequencies = {}
    for number, rotary in enumerate(model.rotaries):
        name = FREQUENCIES + (f".{number}" if number else "")
        frequencies[name] = rotary.frequencies
        if rotary.long is not None:
            frequencies[f"{name}.long"] = rotary.long
    return {**dict(model.named_buffers()), **frequencies}


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
