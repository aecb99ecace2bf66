"""Tests that PPO is the same with the critic on ranks of its own, and that checkpoints go there and back."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.changes import slow_unless_changed
from tests.services.runtime.critic_ranks import Case, measured_of, run
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import save_model
from trainer.config import ParallelConfig
from trainer.roles.config import PlacementConfig

MODULE = "tests.services.runtime.critic_ranks"
APART = PlacementConfig(critic=1)

pytestmark = pytest.mark.xdist_group("layouts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("qwen2-tied", tmp_path_factory.mktemp("model")))


def make(case: Case, logs: Path) -> Case:
    """Run a case, on ranks of its own if it has several."""
    processes = case.parallel.world_size + case.placement.total
    if processes == 1:
        run(case, 0)
    else:
        launch(processes, MODULE, msgspec.json.encode(case).decode(), logs=logs, deadline_s=300)
    return case


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by file and name."""
    return {
        f"{path.relative_to(directory)} {name}": tensor
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_bits(left: str, right: str) -> None:
    a, b = files_of(Path(left)), files_of(Path(right))
    assert a.keys() == b.keys()
    assert any(name.startswith("critic/") for name in a)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@slow_unless_changed("trainer/roles/", "trainer/execution/", "services/runtime/")
def test_a_run_with_its_critic_apart_and_then_beside_is_the_run_beside(model: str, tmp_path: Path) -> None:
    """Checkpoint, steps and checkpoint again in each place are the same bits."""
    updates: dict[str, Any] = {"epochs": 2, "mini_batches": 2}
    first = make(Case("reference", model, (2,), str(tmp_path / "first"), **updates), tmp_path)
    both = [
        make(
            Case("reference", model, (3, 4), str(tmp_path / name), first.out, placement=placed, **updates),
            tmp_path / f"logs-{name}",
        )
        for name, placed in (("beside", PlacementConfig()), ("apart", APART))
    ]
    assert measured_of(both[1]) == measured_of(both[0])
    assert all(measured["value_loss"] for measured in measured_of(both[1]))
    assert_same_bits(both[1].out, both[0].out)
    last = [
        make(Case("reference", model, (3,), str(tmp_path / f"last-{place}"), case.out), tmp_path)
        for place, case in zip(("beside", "apart"), both, strict=True)
    ]
    assert measured_of(last[0]) == measured_of(last[1])
    assert_same_bits(last[0].out, last[1].out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "parallel", "placement", "other"),
    [
        (
            "fsdp",
            ParallelConfig(data_parallel_size=2),
            PlacementConfig(critic=3),
            PlacementConfig(critic=1),
        ),
        (
            "megatron",
            ParallelConfig(data_parallel_size=2),
            PlacementConfig(critic=2, critic_tensor_parallel_size=2),
            PlacementConfig(critic=2),
        ),
    ],
)
def test_a_checkpoint_goes_from_placement_to_placement(
    backend: str,
    parallel: ParallelConfig,
    placement: PlacementConfig,
    other: PlacementConfig,
    model: str,
    tmp_path: Path,
) -> None:
    whole = make(
        Case(backend, model, (2, 3, 4), str(tmp_path / "whole"), parallel=parallel), tmp_path / "l-whole"
    )
    restore, found = "", []
    for step, placed in ((2, placement), (3, other), (4, PlacementConfig())):
        case = Case(backend, model, (step,), str(tmp_path / str(step)), restore, parallel, placed)
        found += measured_of(make(case, tmp_path / f"l-{step}"))
        restore = case.out
    for measured, wanted in zip(found, measured_of(whole), strict=True):
        assert measured == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_rank_0_says_why_the_critic_cannot_be_restored(model: str, tmp_path: Path) -> None:
    other = str(save_model("llama", tmp_path / "other"))
    saved = make(Case("reference", model, (2,), str(tmp_path / "saved")), tmp_path)
    case = Case("reference", other, (3,), str(tmp_path / "out"), saved.out, placement=APART)
    wanted = r"(?s)rank 0: 1\n.*SettingsError: checkpoint \S+ was made by .* with a value head.*rank 1: 1"
    with pytest.raises(AssertionError, match=wanted):
        make(case, tmp_path / "logs")
