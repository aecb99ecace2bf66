"""Tests versions of layers that an engine processes after loading: a toy that quantises to 8 bits."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import EngineSettingsError, WeightError
from protocol.weights.boxes import whole
from rollout.engines.contract.models import write_shm
from rollout.staging.loader_trace import record
from rollout.staging.places import StagingRoom
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.shadows import ShadowedPlacement, ShadowedPlan, Staged, shadowed_plan

OLD = {"gate": torch.randn(4, 16), "up": torch.randn(4, 16), "norm": torch.randn(16)}
NEW = {name: torch.randn_like(tensor) for name, tensor in OLD.items()}


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 rows and their scales, by numpy."""
    scales = np.abs(weight).max(axis=1) / 127
    return np.round(weight / scales[:, None]).astype(np.int8), scales


class Quantised:
    """A fused layer, gates and ups, of which int8 and scales are kept."""

    def __init__(self) -> None:
        self.name = "mlp"
        self.inputs = {"mlp.weight": torch.empty(8, 16, device="meta")}
        self.tensors = self.process(
            {"mlp.weight": torch.cat([OLD["gate"], OLD["up"]])}, lambda tensor: tensor
        )
        self.change: Callable[[dict[str, torch.Tensor]], None] = lambda found: None

    def live(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def process(self, inputs: Mapping[str, torch.Tensor], staged: Staged) -> dict[str, torch.Tensor]:
        weight = inputs["mlp.weight"]
        scale = weight.abs().amax(1) / 127
        found = {"mlp.weight": (weight / scale[:, None]).round().to(torch.int8), "mlp.scale": scale}
        if hasattr(self, "change"):
            self.change(found)
        return found


class Derived:
    """A tensor that is computed from other layers' weights."""

    name = "attention"
    inputs: Mapping[str, torch.Tensor] = {}

    def __init__(self, layer: Quantised, norm: torch.Tensor) -> None:
        self.layer, self.norm = layer, norm
        self.tensors = self.process({}, lambda tensor: tensor)

    def live(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def process(self, inputs: Mapping[str, torch.Tensor], staged: Staged) -> dict[str, torch.Tensor]:
        scale = staged(self.layer.tensors["mlp.scale"])
        return {"attention.sum": scale.sum() + staged(self.norm).sum()}


def load(layer: Quantised, norm: torch.Tensor, named: object) -> None:
    for name, tensor in named:  # type: ignore[attr-defined]
        if name == "norm":
            norm.copy_(tensor)
        else:
            layer.inputs["mlp.weight"].narrow(0, 0 if name == "gate" else 4, 4).copy_(tensor)


def planned(directory: Path, place: str = "device") -> tuple[ShadowedPlan, Quantised, Derived]:
    """Return the plan of a model that was loaded from the files in `directory`, which are written first."""
    save_file(OLD, directory / "model.safetensors")
    layer, norm = Quantised(), OLD["norm"].clone()
    derived = Derived(layer, norm)
    live, shapes, recorder = record(
        lambda named: load(layer, norm, named),
        [("norm", norm), *layer.inputs.items()],
        {name: tuple(tensor.shape) for name, tensor in OLD.items()},
        torch.float32,
    )
    plan = shadowed_plan(live, shapes, recorder, [layer, derived], StagingRoom(place), directory)
    plan.calibrate()
    return plan, layer, derived


@pytest.mark.parametrize("place", ["device", "host", "auto"])
def test_a_version_is_processed_in_the_copy_and_committed_in_place(tmp_path: Path, place: str) -> None:
    plan, layer, derived = planned(tmp_path, place)
    before = {name: tensor.clone() for name, tensor in plan.live.items()}
    places = {name: tensor.data_ptr() for name, tensor in plan.live.items()}
    staging = plan.staging(architecture="", tied=False)
    manifest = write_shm(tmp_path / "v1", NEW, 1)
    staging.fetch(manifest, 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in plan.live.items())
    staging.take(manifest)
    plan.apply()
    weight, scale = quantised(torch.cat([NEW["gate"], NEW["up"]]).numpy())
    assert np.array_equal(layer.tensors["mlp.weight"].numpy(), weight)
    np.testing.assert_allclose(layer.tensors["mlp.scale"].numpy(), scale, rtol=1e-6)
    assert torch.equal(derived.norm, NEW["norm"])
    assert torch.equal(derived.tensors["attention.sum"], layer.tensors["mlp.scale"].sum() + NEW["norm"].sum())
    assert places == {name: tensor.data_ptr() for name, tensor in plan.live.items()}


def test_a_shadow_has_memory_only_until_its_last_slice_came(tmp_path: Path) -> None:
    plan, _, _ = planned(tmp_path)
    memory = next(iter(plan.sources()["up"].slices)).target.untyped_storage()
    placement = ShadowedPlacement(plan.sources(), plan.shadows, plan.staged)
    gate = [("gate", ((row, row + 1), (0, 16)), NEW["gate"][row : row + 1]) for row in range(4)]
    assert placement.destination("up", whole((4, 16))) is None
    assert memory.nbytes() == 0
    placement.place([*gate[:2], ("up", whole((4, 16)), NEW["up"]), gate[3]])
    assert memory.nbytes() == 8 * 16 * 4
    placement.place([gate[2], ("norm", whole((16,)), NEW["norm"])])
    assert memory.nbytes() == 0
    placement.finish()
    weight, _ = quantised(torch.cat([NEW["gate"], NEW["up"]]).numpy())
    assert np.array_equal(plan.staged(plan.live["mlp.weight"]).numpy(), weight)


@pytest.mark.parametrize("fault", ["raises", "another shape"])
def test_failed_processing_names_the_layer_and_changes_nothing(tmp_path: Path, fault: str) -> None:
    plan, layer, _ = planned(tmp_path)
    before = {name: tensor.clone() for name, tensor in plan.live.items()}
    staging, manifest = plan.staging(architecture="", tied=False), write_shm(tmp_path / "v1", NEW, 1)

    def change(found: dict[str, torch.Tensor]) -> None:
        if fault == "raises":
            raise RuntimeError("out of memory")
        found["mlp.scale"] = found["mlp.scale"][:3]

    layer.change = change
    with pytest.raises(WeightError, match="layer mlp could not be processed"):
        staging.fetch(manifest, 10)
    assert staging.staged is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in plan.live.items())
    layer.change = lambda found: None
    staging.fetch(manifest, 10)
    assert staging.staged is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found["mlp.scale"].mul_(2), "layer mlp: .* does not reproduce mlp.scale"),
        (lambda found: found.update({"mlp.zero": torch.zeros(8)}), "layer mlp: mlp.zero is not laid out"),
        (lambda found: found.pop("mlp.weight"), "layer mlp: .* not reachable as tensors"),
        (lambda found: found["mlp.bias"], "layer mlp: its processing cannot be done again.*mlp.bias"),
    ],
)
def test_a_layer_whose_processing_cannot_be_repeated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[object], object], words: str
) -> None:
    made = Quantised.__init__

    def init(layer: Quantised) -> None:
        made(layer)
        layer.change = change

    monkeypatch.setattr(Quantised, "__init__", init)
    with pytest.raises(EngineSettingsError, match=words):
        planned(tmp_path)


def test_memory_that_was_released_asleep_is_staged_in_again(tmp_path: Path) -> None:
    plan, layer, derived = planned(tmp_path)
    staging, manifest = plan.staging(architecture="", tied=False), write_shm(tmp_path / "v1", NEW, 1)
    memory = ReleasableMemory(plan.live.values())
    plan.release()
    memory.release()
    assert not any(tensor.untyped_storage().nbytes() for tensor in plan.releasable)
    in_their_places = [torch.empty(tensor.nbytes) for tensor in plan.live.values()]
    memory.restore()  # at other addresses
    plan.restore()
    staging.fetch(manifest, 10)
    plan.apply()
    assert in_their_places
    weight, scale = quantised(torch.cat([NEW["gate"], NEW["up"]]).numpy())
    assert np.array_equal(layer.tensors["mlp.weight"].numpy(), weight)
    expected = scale.sum() + NEW["norm"].sum()
    torch.testing.assert_close(derived.tensors["attention.sum"], expected.to(torch.float32))


def test_staging_without_a_copy_is_refused_for_a_processed_layer(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match=r"engine\.staging: 'layers' has no copy"):
        planned(tmp_path, "layers")
