"""Tests what is remembered of layers before SGLang loads and processes their weights."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from rollout.engines.contract.models import write_shm
from rollout.engines.multi_process.processed_layers import PROCESS, plan_of
from rollout.engines.sglang.layers import UNLOADED, loader_of, remember, sglang_processings
from rollout.staging.places import StagingPlace, StagingRoom


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


class Scales:
    """What SGLang does with the scales of a cache in 8 bits: none is loaded, so each is 1."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        with torch.no_grad():
            layer.k_scale.fill_(1.0)


class Model(torch.nn.Module):
    """A weight that is loaded, and attention that has a scale alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 2, bias=False)
        self.attn = torch.nn.Module()
        self.attn.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.attn.quant_method = Scales()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_a_version_gives_attention_the_scales_that_no_loader_fills(tmp_path: Path) -> None:
    model = Model()
    remember(model)
    save_file({"out.weight": model.out.weight.detach()}, tmp_path / "model.safetensors")
    model.attn.quant_method.process_weights_after_loading(model.attn)
    plan = plan_of(
        loader_of(model),
        lambda differing: sglang_processings(model, differing),
        {"out.weight": (2, 3)},
        torch.float32,
        StagingRoom(StagingPlace.DEVICE),
        tmp_path,
    )
    staging = plan.staging(architecture="", tied=False)
    weight = torch.arange(6.0).view(2, 3)
    version = write_shm(tmp_path / "version", {"out.weight": weight}, 1, bucket_bytes=1 << 20)
    staging.fetch(version, time.monotonic() + 10)
    staging.take(version)
    with torch.no_grad():
        model.attn.k_scale.fill_(float("nan"))  # as memory that sleep has released
    plan.apply()
    assert torch.equal(model.out.weight, weight)
    assert model.attn.k_scale == 1
