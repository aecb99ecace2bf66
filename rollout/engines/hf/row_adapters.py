"""Adds named adapters to batch rows, with hooks on linear layers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from protocol.errors import EngineSettingsError
from rollout.engines.named_adapters import NamedAdapter

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Adapter name -> (A, scaled B) of one layer."""


class RowAdapters:
    """Adapters of a model, and their assignment to the rows of the next pass."""

    def __init__(self, model: torch.nn.Module, adapters: Iterable[NamedAdapter]) -> None:
        """Register hooks on the layers of `model` that an adapter changes.

        Raises:
            EngineSettingsError: an adapter changes a layer that is not linear.
        """
        self._rows: Sequence[str] = ()
        layers: dict[str, Pairs] = {}
        for adapter in adapters:
            for target in adapter.targets:
                layers.setdefault(target.module, {})
            first = next(model.parameters())
            for weight, (a, b) in adapter.pairs(first.dtype).items():
                layers[weight.removesuffix(".weight")][adapter.name] = a.to(first.device), b.to(first.device)
        modules = dict(model.named_modules())
        for name, pairs in layers.items():
            module = modules.get(name)
            if not isinstance(module, torch.nn.Linear):
                raise EngineSettingsError(
                    f"adapter {next(iter(pairs))!r}: engine hf has no plain linear layer {name}; "
                    "remove it from the adapter"
                )
            module.register_forward_hook(_hook(self, pairs))

    def choose(self, rows: Sequence[str]) -> None:
        """Set the adapter name of each row for the next passes; "": no adapter."""
        self._rows = rows

    def add(self, pairs: Pairs, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return a layer's output plus the adapters of its rows; shapes [N, S, width] or [N * S, width]."""
        inputs, found = x.reshape(len(self._rows), -1, x.shape[-1]), output.clone()
        outputs = found.view(len(self._rows), -1, output.shape[-1])
        for name in pairs.keys() & set(self._rows):
            index = [number for number, row in enumerate(self._rows) if row == name]
            a, b = pairs[name]
            outputs[index] += F.linear(F.linear(inputs[index], a), b)
        return found


def _hook(rows: RowAdapters, pairs: Pairs) -> Any:
    return lambda module, inputs, output: rows.add(pairs, inputs[0], output)
