"""Adds adapters to a transformers model, each as submodule `lora` of its layer."""

from typing import Any

import torch
import torch.nn.functional as F

from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_targets
from protocol.weights.peft import check_peft
from trainer.lora import AdapterSwitch, initial_adapters


class LowRank(torch.nn.Module, AdapterSwitch):
    """One adapter: x -> scaling * B A x, all in the dtype of x."""

    def __init__(self, layer: Any, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Store A and B on the device of the adapted layer."""
        super().__init__()
        if not layer.weight.is_meta:
            a, b = a.to(layer.weight.device), b.to(layer.weight.device)
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.scaling = scaling

    def added(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output plus the adapter's output for x."""
        return output + self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaling * F.linear(F.linear(self.dropped(x), self.a), self.b)


def attach(
    model: torch.nn.Module, config: LoraConfig, seed: int, kind: type[LowRank] = LowRank
) -> tuple[list[AdapterTarget], dict[str, torch.nn.Parameter]]:
    """Freeze the model and add adapters; return the targets, and the adapters' parameters by PEFT name.

    Raises:
        SettingsError: the model lacks a target module.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    targets = adapter_targets(shapes, config)
    check_peft(targets, config)
    model.requires_grad_(False)
    parameters: dict[str, torch.nn.Parameter] = {}
    first = initial_adapters(targets, config, seed)
    for target in targets:
        layer: Any = model.get_submodule(target.module)
        layer.lora = kind(layer, first[target.a], first[target.b], config.scaling)
        layer.register_forward_hook(_add)
        parameters |= {target.a: layer.lora.a, target.b: layer.lora.b}
    return targets, parameters


def _add(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return layer.lora.added(output, inputs[0]) if layer.lora.is_on else output
