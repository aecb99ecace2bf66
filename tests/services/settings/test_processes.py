"""Tests which GPUs each process sees, and which lists of GPUs are refused."""

import pytest

from protocol.errors import SettingsError
from reward.config import RewardConfig, VerifierConfig
from services.settings.processes import (
    ServicesConfig,
    check_gpus,
    check_separate_roles,
    gpu_variables,
    reward_ranks,
    rollout_variables,
)
from trainer.config import TrainerConfig
from trainer.roles.config import PlacementConfig, ReferenceConfig, TeacherConfig


def test_without_lists_everybody_sees_what_the_supervisor_sees() -> None:
    assert gpu_variables("") == {}
    assert rollout_variables(ServicesConfig(), 2, 5) == {}


def test_gpu_variables_name_the_gpus_of_a_list() -> None:
    assert gpu_variables("3, 4") == {"CUDA_VISIBLE_DEVICES": "3,4"}


def test_rollout_workers_take_their_gpus_in_turn() -> None:
    config = ServicesConfig(trainer_gpus="0, 1", rollout_gpus="2,3,GPU-a,5,6")
    assert gpu_variables(config.trainer_gpus) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert [rollout_variables(config, 2, i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == [
        "2,3",
        "GPU-a,5",
        "2,3",
    ]
    assert [rollout_variables(config, 1, i)["CUDA_VISIBLE_DEVICES"] for i in range(6)] == [
        "2",
        "3",
        "GPU-a",
        "5",
        "6",
        "2",
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            ServicesConfig(trainer_gpus="0"),
            "services.trainer_gpus: '0' names 1 GPUs, the trainer has 2 ranks",
        ),
        (
            ServicesConfig(rollout_gpus="0,1"),
            "services.rollout_gpus: '0,1' names 2 GPUs, engine.tensor_parallel_size is 4",
        ),
        (ServicesConfig(trainer_gpus="1,1"), "names a GPU twice"),
        (
            ServicesConfig(reward_gpus="7"),
            "services.reward_gpus: '7' names 1 GPUs, a reward model is on 2 GPUs",
        ),
    ],
)
def test_lists_that_cannot_work_are_refused(config: ServicesConfig, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        check_gpus(config, 2, 4, 2)


def test_a_reward_worker_has_the_gpus_of_its_largest_model() -> None:
    given: list[dict[str, object]] = [{}, {"tensor_parallel_size": 4}, {"tensor_parallel_size": "2"}]
    verifiers = [VerifierConfig("reward_model", options=options) for options in given]
    other = VerifierConfig("function", options={"tensor_parallel_size": 8})
    assert reward_ranks(RewardConfig(verifiers=(*verifiers, other))) == 4
    assert reward_ranks(RewardConfig()) == 1


ROLES = {"reference": ReferenceConfig(), "teacher": TeacherConfig(path="there")}


def test_models_apart_follow_the_policys_ranks_in_layouts_of_their_own() -> None:
    placement = PlacementConfig(teacher=4, teacher_tensor_parallel_size=2, reference=1)
    check_separate_roles(placement, TrainerConfig(), ROLES, colocated=False)
    assert list(placement.ranks.items()) == [("reference", 1), ("teacher", 4)]
    assert placement.total == 5
    teacher = placement.layout("teacher")
    assert (teacher.tensor_model_parallel_size, teacher.data_parallel_size, teacher.world_size) == (2, 2, 4)


def test_a_critic_apart_follows_frozen_models() -> None:
    placement = PlacementConfig(critic=2, critic_tensor_parallel_size=2, reference=1)
    check_separate_roles(placement, TrainerConfig(), ROLES, colocated=False)
    assert list(placement.ranks.items()) == [("reference", 1), ("critic", 2)]
    assert placement.layout("critic").tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("placement", "backend", "offload", "colocated", "text"),
    [
        (
            PlacementConfig(teacher=1),
            "scripted",
            False,
            False,
            "placement.teacher: 1: .* does not support separate models",
        ),
        (PlacementConfig(critic=2), "reference", False, False, "placement.critic: 2: .* set it to 1"),
        (PlacementConfig(critic=1), "megatron", False, True, "placement.critic: 1: with colocated.enabled"),
        (PlacementConfig(reference=2), "reference", False, False, "placement.reference: 2: .* set it to 1"),
        (
            PlacementConfig(teacher=2, teacher_tensor_parallel_size=2),
            "fsdp",
            False,
            False,
            "teacher_tensor_parallel_size: 2: trainer.backend 'fsdp' has no tensor ranks",
        ),
        (
            PlacementConfig(teacher=3, teacher_tensor_parallel_size=2),
            "megatron",
            False,
            False,
            "placement.teacher: 3: .* 2 does not divide it",
        ),
        (PlacementConfig(teacher=1), "megatron", True, False, "setting teacher.offload: .*ranks of its own"),
        (PlacementConfig(teacher=1), "megatron", False, True, "placement.teacher: 1: with colocated.enabled"),
    ],
)
def test_models_apart_that_cannot_work_are_refused(
    placement: PlacementConfig, backend: str, offload: bool, colocated: bool, text: str
) -> None:
    roles = {**ROLES, "teacher": TeacherConfig(path="there", offload=offload)}
    with pytest.raises(SettingsError, match=text):
        check_separate_roles(placement, TrainerConfig(backend=backend), roles, colocated=colocated)
