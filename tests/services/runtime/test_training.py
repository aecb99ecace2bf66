"""Tests that a step comes out the same where the models beside the policy have ranks of their own."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from rollout.engines.base import EngineConfig
from services.runtime.training import build_models, head_bytes
from services.settings.sections import Settings
from tests.changes import slow_unless_changed
from tests.contracts.engine_draft_models import tiny_shallow
from tests.services.runtime.apart_ranks import Case, make_steps, measured
from tests.trainer.classifiers import save_classifier
from tests.trainer.heads import learnt, make_models, texts, write_random_head
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import save_model
from trainer.config import ParallelConfig
from trainer.execution.executor import Executor
from trainer.reference.eagle import EagleTraining
from trainer.roles.config import PlacementConfig

MODULE = "tests.services.runtime.apart_ranks"
HERE = "tests/services/runtime/"


def compare(case: Case, tmp_path: Path, tolerance: float) -> None:
    """Make the steps of a case, and on one rank that has all models in plain torch."""
    results, processes = tmp_path / "found.pt", case.parallel.world_size + case.placement.total
    arguments = msgspec.json.encode(case).decode(), str(results)
    launch(processes, MODULE, *arguments, logs=tmp_path / "logs", deadline_s=300)
    found = torch.load(results, weights_only=True)
    executor = Executor(build_models(Case("reference", case.model, case.teacher, case.reward_model).settings))
    stats, weights = make_steps(executor)
    executor.close()
    wanted = measured(stats)
    assert all(wanted[-1])  # after the first step the policy differs from both
    for step, own in zip(found["measured"], wanted, strict=True):
        assert step == pytest.approx(own, rel=tolerance, abs=tolerance)
    assert found["weights"].keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=tolerance, atol=tolerance)


def models(tmp_path: Path) -> tuple[str, str, str]:
    """The policy's model, and a teacher and a classifier of the same vocabulary that say something else."""
    policy, teacher = save_model("qwen2-tied", tmp_path / "policy"), save_model("llama", tmp_path / "teacher")
    return str(policy), str(teacher), str(save_classifier(teacher, tmp_path / "classifier"))


@slow_unless_changed("trainer/roles/", "trainer/execution/", "trainer/ranks/", "services/runtime/", HERE)
@pytest.mark.xdist_group("layouts")
def test_frozen_models_apart_make_the_same_bits(tmp_path: Path) -> None:
    compare(
        Case(
            "reference", *models(tmp_path), placement=PlacementConfig(reference=1, teacher=1, reward_model=1)
        ),
        tmp_path,
        0,
    )


@pytest.mark.slow
@pytest.mark.xdist_group("layouts")
@pytest.mark.parametrize(
    ("backend", "parallel", "placement"),
    [
        (
            "fsdp",
            ParallelConfig(data_parallel_size=2),
            PlacementConfig(reference=1, teacher=3, reward_model=2),
        ),
        (
            "megatron",
            ParallelConfig(tensor_model_parallel_size=1, data_parallel_size=2),
            PlacementConfig(reference=1, teacher=2, teacher_tensor_parallel_size=2),
        ),
        (
            "megatron",
            ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=1),
            PlacementConfig(teacher=2, reward_model=2, reward_model_tensor_parallel_size=2),
        ),
    ],
)
def test_any_layouts_make_the_same_step(
    backend: str, parallel: ParallelConfig, placement: PlacementConfig, tmp_path: Path
) -> None:
    compare(Case(backend, *models(tmp_path), parallel, placement), tmp_path, 1e-5)


def test_planned_memory_of_a_head_is_what_its_training_holds(tmp_path: Path) -> None:
    target = tiny_shallow(1)
    target.save_pretrained(tmp_path / "model")
    head = write_random_head(target, tmp_path)
    ranks = make_models("reference", tmp_path / "model", head)
    drafts = ranks.drafts
    assert isinstance(drafts, EagleTraining)
    learnt(drafts, texts(target, 0))
    masters = list(drafts._stepper.masters.values())
    moments = [it for state in drafts._stepper.optimizer.state.values() for it in state.values() if it.ndim]
    held = sum(it.nbytes for it in (*masters, *moments, *drafts.published.values()))
    gradients = sum(it.nbytes for it in masters)
    ranks.close()
    trained = EngineConfig(drafts="model", draft_model=str(head), draft_lr=1e-4)
    assert head_bytes(Settings(engine=trained)) == held + gradients
    assert head_bytes(Settings(engine=replace(trained, draft_lr=0.0))) == 0
