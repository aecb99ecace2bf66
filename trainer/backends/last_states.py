"""Reads a model's last hidden states, the input of its output layer.

Shapes: t tokens of a batch, h elements of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch


class LastStates(NamedTuple):
    """Hidden states of a batch's tokens, and the embedding and output layers."""

    states: torch.Tensor
    """[t, h]: state from which each token is predicted; undefined for the first token of a sample."""
    embedding: torch.Tensor
    """[V, h]"""
    output: torch.Tensor
    """[V, h]"""


def read_by_output(model: Any, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the inputs of a transformers model's output layer, [n, L, h], without computing logits.

    Args:
        arguments: input_ids [n, L] and others.
    """
    read: list[torch.Tensor] = []

    def keep(layer: object, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        read.append(inputs[0])
        return inputs[0][:, :1]

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        model(**arguments, use_cache=False)
    finally:
        handle.remove()
    return read[0]
