"""Reads a model's last hidden states, what its output layer computes logits of.

Shapes: t tokens of a batch, h elements of a state, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    """Return what the output layer of a model of transformers reads in a pass, without logits of all of it.

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
