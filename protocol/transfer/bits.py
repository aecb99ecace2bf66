"""Tensors looked at bit by bit."""

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size -> a dtype to look at bits through."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which compare bit by bit."""
    return tensor.view(INTEGERS[tensor.element_size()])
