"""Tests parameters in float32 that take versions in 16 bits: in every place, by digests of both types."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import whole
from rollout.engines.contract.models import write_shm
from rollout.staging.loader_trace import record
from rollout.staging.placement import SlicePlacement
from rollout.staging.places import StagingPlace, StagingRoom
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankState
from rollout.staging.shadows import shadowed_plan
from rollout.staging.shared_weights import SharedStaging
from rollout.staging.staging import digest_of, whole_source
from rollout.staging.staging_plan import trace

PLACES = [StagingPlace.DEVICE, StagingPlace.HOST, StagingPlace.LAYERS]
HALVES = [torch.bfloat16, torch.float16]


class GatedDelta(torch.nn.Module):
    """A layer in 16 bits with a decay and a transposed bias in float32, whose loader converts the decay."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=dtype), requires_grad=False)
        self.decay = torch.nn.Parameter(torch.randn(8), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(3, 2), requires_grad=False)

    def load_weights(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            parameter = getattr(self, name)
            parameter.copy_(tensor.mT if name == "bias" else tensor.to(parameter.dtype))


SHAPES = {"weight": (6, 4), "decay": (8,), "bias": (2, 3)}


def rank(layer: GatedDelta, place: StagingPlace) -> RankStaging:
    plan = trace(layer.load_weights, layer.named_parameters(), SHAPES, layer.weight.dtype, StagingRoom(place))
    return RankStaging(plan, architecture="", tied=False)


def version(
    directory: Path, number: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], WeightManifest]:
    torch.manual_seed(number)
    new = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    return new, write_shm(directory / f"v{number}", new, number)


def commit(share: RankStaging, manifest: WeightManifest) -> None:
    assert share.stage(manifest, 10) == ""
    end = time.monotonic() + 10
    while share.status().state == RankState.STAGING and time.monotonic() < end:
        time.sleep(0.001)
    assert share.status().covered == sum(entry.nbytes for entry in manifest.tensors)
    assert share.commit(manifest).applied


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("place", PLACES)
def test_wider_parameters_take_each_version_and_show_its_digest(
    tmp_path: Path, place: StagingPlace, dtype: torch.dtype
) -> None:
    layer = GatedDelta(dtype)
    share = rank(layer, place)
    assert share.live_digest()[1] == digest_of(
        {**dict(layer.named_parameters()), "bias": layer.bias.mT.contiguous()}
    )
    for number in (1, 2):
        new, manifest = version(tmp_path, number, dtype)
        commit(share, manifest)
        assert layer.decay.dtype is layer.bias.dtype is torch.float32
        assert torch.equal(layer.weight, new["weight"])
        assert torch.equal(layer.decay, new["decay"].float())
        assert torch.equal(layer.bias, new["bias"].mT.float())
        assert share.live_digest() == (True, manifest.digest)
    share.sleep()
    share.wake()
    _, manifest = version(tmp_path, 3, dtype)
    commit(share, manifest)
    assert share.live_digest() == (True, manifest.digest)


@pytest.mark.parametrize("place", PLACES)
def test_live_digest_changes_with_a_bit_that_the_narrow_type_does_not_have(
    tmp_path: Path, place: StagingPlace
) -> None:
    layer = GatedDelta(torch.bfloat16)
    share = rank(layer, place)
    commit(share, version(tmp_path, 1, torch.bfloat16)[1])
    before = share.live_digest()
    layer.decay.view(torch.int32)[3] ^= 1
    assert share.live_digest() != before
    layer.decay.view(torch.int32)[3] ^= 1
    assert share.live_digest() == before


@pytest.mark.parametrize("place", PLACES)
def test_versions_may_change_between_the_narrow_and_the_wide_type(
    tmp_path: Path, place: StagingPlace
) -> None:
    layer = GatedDelta(torch.bfloat16)
    share = rank(layer, place)
    for number, decay in enumerate([torch.bfloat16, torch.float32, torch.float16], 1):
        new, _ = version(tmp_path / "made", number, torch.bfloat16)
        new["decay"] = torch.randn(8).to(decay)
        manifest = write_shm(tmp_path / f"v{number}", new, number)
        commit(share, manifest)
        assert torch.equal(layer.decay, new["decay"].float())
        assert share.live_digest() == (True, manifest.digest)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("weight", torch.float32),
        ("weight", torch.float16),
        ("decay", torch.float64),
        ("decay", torch.int8),
        ("decay", torch.uint8),
    ],
)
def test_a_conversion_that_rounds_is_refused_by_name(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    layer = GatedDelta(torch.bfloat16)
    plan = trace(layer.load_weights, layer.named_parameters(), SHAPES, torch.bfloat16, StagingRoom())
    staging = plan.staging(architecture="", tied=False)
    new, manifest = version(tmp_path, 1, torch.bfloat16)
    staging.fetch(manifest, 10)
    staging.take(manifest)
    plan.apply()
    live = digest_of(dict(layer.named_parameters()))
    kind = str(dtype).removeprefix("torch.")
    wrong = write_shm(tmp_path / "wrong", {**new, name: new[name].to(dtype)}, 2)
    with pytest.raises(WeightError, match=rf"tensor {name} is {kind}\[.*the engine's {name} is"):
        staging.fetch(wrong, 10)
    assert digest_of(dict(layer.named_parameters())) == live
    staging.fetch(manifest, 10)  # what was learnt of the last layout has stayed
    assert staging.live_digest((name, tensor) for name, tensor, _ in plan.gathered()) == manifest.digest


def test_a_converted_tensor_is_never_received_in_its_place() -> None:
    target, other = torch.zeros(4), torch.zeros(4)
    expected = {"a": whole_source(target), "b": whole_source(other)}
    placement = SlicePlacement(expected, {"a"})
    assert placement.destination("a", whole((4,))) is None
    place = placement.destination("b", whole((4,)))
    assert place is not None
    assert place.data_ptr() == other.data_ptr()
    placement.place([("a", whole((4,)), torch.arange(4, dtype=torch.bfloat16))])
    assert target.tolist() == [0, 1, 2, 3]


def test_shared_memory_is_not_converted(tmp_path: Path) -> None:
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(4).bfloat16()}, 1)
    with pytest.raises(WeightError, match=r"tensor a is bfloat16\[4\], the engine's a is float32\[4\]"):
        SharedStaging({"a": whole_source(torch.zeros(4))}).check(manifest)


class Biased:
    """A layer whose bias its engine makes in float32, and rounds when it processes the layer."""

    name = "experts"

    def __init__(self) -> None:
        self.inputs = {"experts.bias": torch.empty(4, device="meta")}
        self.tensors = {"experts.bias": torch.zeros(4)}

    def live(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def process(self, inputs: dict[str, torch.Tensor], staged: object) -> dict[str, torch.Tensor]:
        return {"experts.bias": inputs["experts.bias"] * 2}


def test_a_shadow_takes_narrower_tensors(tmp_path: Path) -> None:
    layer, norm = Biased(), torch.zeros(4, dtype=torch.bfloat16)

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            (norm if name == "norm" else layer.inputs["experts.bias"]).copy_(tensor)

    parameters = [("norm", norm), *layer.inputs.items()]
    live, shapes, recorder = record(load, parameters, {"norm": (4,), "bias": (4,)}, torch.bfloat16)
    plan = shadowed_plan(live, shapes, recorder, [layer], StagingRoom(), tmp_path)
    staging = plan.staging(architecture="", tied=False)
    new = {"norm": torch.randn(4).bfloat16(), "bias": torch.randn(4).bfloat16()}
    manifest = write_shm(tmp_path / "v1", new, 1)
    staging.fetch(manifest, 10)
    staging.take(manifest)
    plan.apply()
    assert torch.equal(norm, new["norm"])
    assert torch.equal(layer.tensors["experts.bias"], new["bias"].float() * 2)
