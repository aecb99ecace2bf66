"""Tests tracing of a model's loader: what is copied where, and which loaders are refused."""

from pathlib import Path

import pytest
import torch

from protocol.errors import EngineSettingsError
from rollout.engines.contract.models import write_shm
from rollout.staging.places import StagingRoom
from rollout.staging.staging import Staging, digest_of
from rollout.staging.staging_plan import trace
from tests.rollout.staging.models import SHAPES, Fused, traced


def test_plan_copies_what_the_traced_loader_would_have_copied(tmp_path: Path) -> None:
    model, other = Fused(), Fused()
    before = digest_of(dict(model.named_parameters()))
    plan = traced(model)
    plan.calibrate()
    assert digest_of(dict(model.named_parameters())) == before
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    staging = Staging(plan.sources())
    manifest = write_shm(tmp_path / "v1", new, 1)
    assert staging.fetch(manifest, 10) == sum(t.nbytes for t in new.values())
    assert digest_of(dict(model.named_parameters())) == before
    staging.take(manifest)
    padding = model.embed[5:].clone()
    plan.apply()
    other.load_weights(new.items())
    assert torch.equal(model.qk, other.qk)
    assert torch.equal(model.embed[:5], other.embed[:5])
    assert torch.equal(model.embed[5:], padding)
    assert all(whole and torch.equal(tensor, new[name]) for name, tensor, whole in plan.gathered())


def test_buffer_over_staging_mb_is_not_allocated() -> None:
    model = Wide()
    with pytest.raises(
        EngineSettingsError, match=r"engine\.staging_mb is 1, a copy of the parameters takes 2 MiB"
    ):
        trace(
            model.load_weights,
            model.named_parameters(),
            {"wide": (1 << 19,)},
            torch.float32,
            StagingRoom(mb=1),
        )


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(1 << 19))

    def load_weights(self, named: object) -> None:
        for _, tensor in named:  # type: ignore[attr-defined]
            self.wide.data.copy_(tensor)


@pytest.mark.parametrize("missing", sorted(SHAPES))
def test_parameter_that_the_loader_does_not_fill_is_named(missing: str) -> None:
    with pytest.raises(
        EngineSettingsError, match="parameter embed" if missing == "embed" else "parameter qk"
    ):
        traced(Fused(), {name: shape for name, shape in SHAPES.items() if name != missing})


def test_parameter_repacked_after_loading_fails_calibration() -> None:
    class Computed(Fused):
        def load_weights(self, named: object) -> None:
            super().load_weights((name, tensor * 2) for name, tensor in named)  # type: ignore[attr-defined]

    with pytest.raises(EngineSettingsError, match="computes what it copies"):
        traced(Computed())

    class Scaled(Fused):
        def load_weights(self, named: object) -> None:
            super().load_weights(named)
            self.qk.data.mul_(2)

    with pytest.raises(EngineSettingsError, match="parameter qk: its loader calls"):
        traced(Scaled())

    model = Fused()
    model.qk = torch.nn.Parameter(torch.empty(0))
    with pytest.raises((EngineSettingsError, RuntimeError)):
        traced(model)


def test_loader_that_writes_one_place_twice_fails_calibration() -> None:
    class Twice(Fused):
        def load_weights(self, named: object) -> None:
            for name, tensor in named:  # type: ignore[attr-defined]
                if name == "embed":
                    self.embed[:5].data.copy_(tensor)
                    self.embed[5:].data.fill_(0)
                elif name == "q":
                    self.qk.data.narrow(0, 0, 4).copy_(tensor)
                else:
                    self.qk.data.narrow(0, 0, 2).copy_(tensor)

    with pytest.raises(
        EngineSettingsError, match="parameter qk: staging the live weights does not reproduce them"
    ):
        traced(Twice()).calibrate()


class Joining(torch.nn.Module):
    """Loads two tensors as one, as SGLang's model of DeepSeek-V3 does."""

    def __init__(self, dim: int, rows: int) -> None:
        super().__init__()
        self.dim, self.rows = dim, rows
        self.fused = torch.nn.Parameter(torch.randn(*((5, 3) if dim == 0 else (3, 5)))[:rows])

    def load_weights(self, named: object) -> None:
        parts = dict(named)  # type: ignore[call-overload]
        self.fused.data.copy_(self.part(torch.cat([parts["a"], parts["b"]], dim=self.dim)))

    def part(self, joined: torch.Tensor) -> torch.Tensor:
        """Return what is loaded of it."""
        return joined[: self.rows]


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_tensors_go_where_the_loader_puts_each(dim: int, tmp_path: Path) -> None:
    shapes = {"a": (2, 3) if dim == 0 else (3, 2), "b": (3, 3)}
    model = Joining(dim, 5 if dim == 0 else 3)
    plan = trace(model.load_weights, model.named_parameters(), shapes, torch.float32, StagingRoom())
    plan.calibrate()
    new = {name: torch.randn(shape) for name, shape in shapes.items()}
    staging = plan.staging(architecture="", tied=False)
    manifest = write_shm(tmp_path / "v1", new, 1)
    staging.fetch(manifest, 10)
    staging.take(manifest)
    plan.apply()
    assert torch.equal(model.fused, torch.cat([new["a"], new["b"]], dim=dim))
    assert {name: tensor.tolist() for name, tensor, _ in plan.gathered()} == {
        name: tensor.tolist() for name, tensor in new.items()
    }


class Turning(Joining):
    """Loads the transposed of them, which is square."""

    def part(self, joined: torch.Tensor) -> torch.Tensor:
        return joined.T


@pytest.mark.parametrize(("model", "rows"), [(Joining(0, 4), 3), (Turning(0, 3), 1)])
def test_other_views_of_joined_tensors_are_refused(model: Joining, rows: int) -> None:
    with pytest.raises(EngineSettingsError, match="parameter fused: its loader computes what it copies"):
        trace(
            model.load_weights,
            model.named_parameters(),
            {"a": (2, 3), "b": (rows, 3)},
            torch.float32,
            StagingRoom(),
        )
