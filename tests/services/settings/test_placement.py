"""Tests which GPUs each process sees, and which lists of GPUs are refused."""

import pytest

from protocol.errors import SettingsError
from services.settings.placement import (
    ServicesConfig,
    check_gpus,
    gpu_variables,
    rollout_variables,
)


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
    ],
)
def test_lists_that_cannot_work_are_refused(config: ServicesConfig, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        check_gpus(config, 2, 4)
