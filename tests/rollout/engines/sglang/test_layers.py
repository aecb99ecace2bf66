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


class Eighths:
    """Quantises as SGLang does: weights are rounded, and lie transposed afterwards."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter((layer.weight * 8).round().t() / 8, requires_grad=False)


class LatentModel(torch.nn.Module):
    """Latent attention whose tensors are made of weights that are quantised afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 2, bias=False)
        attention = torch.nn.Module()
        attention.kv_b_proj = torch.nn.Linear(3, 4, bias=False)
        attention.kv_b_proj.weight.weight_loader = None
        attention.kv_b_proj.quant_method = Eighths()
        attention.w_kc = attention.w_vc = None
        layer = torch.nn.Module()
        layer.self_attn = attention
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.start_layer, self.model.end_layer = 0, 1

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        for number in range(self.model.start_layer, self.model.end_layer):
            attention = self.model.layers[number].self_attn
            found = (part.clone() for part in attention.kv_b_proj.weight.detach().split(2))
            attention.w_kc, attention.w_vc = (
                new if old is None else old.copy_(new)
                for old, new in zip((attention.w_kc, attention.w_vc), found, strict=True)
            )


def test_a_version_gives_latent_attention_what_it_takes_from_weights_before_they_are_quantised(
    tmp_path: Path,
) -> None:
    model = LatentModel()
    remember(model)
    expanded = "model.layers.0.self_attn.kv_b_proj.weight"
    made = {"out.weight": torch.rand(2, 3), expanded: torch.rand(4, 3)}
    save_file(made, tmp_path / "model.safetensors")
    model.load_weights(made.items())
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.quant_method.process_weights_after_loading(attention.kv_b_proj)
    plan = plan_of(
        loader_of(model),
        lambda differing: sglang_processings(model, differing),
        {name: tuple(tensor.shape) for name, tensor in made.items()},
        torch.float32,
        StagingRoom(StagingPlace.DEVICE),
        tmp_path,
    )
    staging = plan.staging(architecture="", tied=False)
    weights = {name: torch.rand_like(tensor) for name, tensor in made.items()}
    version = write_shm(tmp_path / "version", weights, 1, bucket_bytes=1 << 20)
    staging.fetch(version, time.monotonic() + 10)
    staging.take(version)
    assert torch.equal(attention.w_kc, made[expanded][:2]), "a live tensor changed before the commit"
    plan.apply()
    assert torch.equal(attention.w_kc, weights[expanded][:2])
    assert torch.equal(attention.w_vc, weights[expanded][2:])
    assert torch.equal(attention.kv_b_proj.weight, (weights[expanded] * 8).round().t() / 8)
