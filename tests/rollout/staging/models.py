"""Builds small models with their loaders, and staging copies, for tests of staging."""

from collections.abc import Iterable
from typing import Any

import torch

from rollout.staging.places import StagingPlace, StagingRoom
from rollout.staging.staging import Staging, whole_source
from rollout.staging.staging_plan import trace


class Fused(torch.nn.Module):
    """A loader like vLLM's: q and k fused, the vocabulary padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.randn(6, 4))
        self.embed = torch.nn.Parameter(torch.randn(8, 4))
        self.head = self.embed

    def load_weights(self, named: object) -> None:
        for name, tensor in named:  # type: ignore[attr-defined]
            if name == "embed":
                self.embed[:5].data.copy_(tensor)
                self.embed[5:].data.fill_(0)
            else:
                self.qk.data.narrow(0, 0 if name == "q" else 4, tensor.shape[0]).copy_(tensor)


SHAPES = {"q": (4, 4), "k": (2, 4), "embed": (5, 4)}


def traced(
    model: Fused, shapes: dict[str, tuple[int, ...]] = SHAPES, place: StagingPlace = StagingPlace.DEVICE
) -> Any:
    """Return a plan, of the class that the place has."""
    return trace(
        model.load_weights,
        model.named_parameters(remove_duplicate=False),
        shapes,
        torch.float32,
        StagingRoom(place),
    )


OLD, NEW = {"a": torch.ones(4)}, {"a": torch.full((4,), 2.0)}


def staging() -> Staging:
    return Staging({"a": whole_source(torch.empty(4))})


class OneTensor(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.a.copy_(tensor)
