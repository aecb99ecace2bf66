"""Reads a model's last hidden states, of which its output layer computes logits.

Shapes: t tokens of a batch, h elements of a state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch


class LastStates(NamedTuple):
    """Hidden states of a batch's tokens, and the layers around them."""

    states: torch.Tensor
    """[t, h], the state from which each token is predicted; without meaning at the first of a sample."""
    embedding: torch.Tensor
    """[V, h]"""
    output: torch.Tensor
    """[V, h]"""


def read_by_output(model: Any, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the inputs of the output layer of a model of transformers, whose logits are not computed.

    Args:
        model: the model.
        arguments: input_ids [n, L] and others.

    Returns: [n, L, h].
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
