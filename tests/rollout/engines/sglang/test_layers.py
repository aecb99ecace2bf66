"""Tests what is remembered of layers before SGLang loads and processes their weights."""

from types import SimpleNamespace

import torch

from rollout.engines.multi_process.processed_layers import PROCESS
from rollout.engines.sglang.layers import UNLOADED, remember


def test_parameters_that_no_loader_fills_are_remembered_as_they_were_made() -> None:
    layer = torch.nn.Linear(2, 1)
    layer.quant_method = SimpleNamespace(**{PROCESS: lambda layer: None})
    made = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}
    remember(layer)
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.fill_(7)  # as SGLang processes scales of experts, in place
    found = vars(layer)[UNLOADED](torch.device("cpu"))
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())
