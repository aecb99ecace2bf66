"""Holds what the tests of attaching share, whichever backend attaches."""

from collections.abc import Callable
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]


def change(
    which: int, name: str, changed: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[tuple[Tensors, Tensors]], None]:
    """A change of one tensor of (parameters, buffers); None takes it away."""

    def apply(tensors: tuple[Tensors, Tensors]) -> None:
        found = changed(tensors[which].pop(name, torch.zeros(3)))
        if found is not None:
            tensors[which][name] = found

    return apply


def assert_lies_in_shared_memory(model: torch.nn.Module) -> None:
    """Every parameter of the model."""
    places = [
        line.split()[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:tether-shared" in line
    ]
    spans = [tuple(int(end, 16) for end in place.split("-")) for place in places]
    for name, parameter in model.named_parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans), name
