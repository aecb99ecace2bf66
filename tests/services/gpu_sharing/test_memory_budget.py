"""The memory budget of a shared GPU in each turn; the numbers are those of a 7 B model on 80 and 140 GiB."""

import pytest

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from services.gpu_sharing.memory_budget import CONTEXT_GB, GpuMemory, check_budget
from trainer.config import AlgorithmConfig, ParallelConfig, TrainerConfig, WeightConfig

PARAMETERS = 7 << 30


def shares(
    total_gb: float,
    *,
    engine: dict[str, object] | None = None,
    trainer: dict[str, object] | None = None,
    workers: int = 1,
    ranks: int = 1,
    transport: str = "shm",
    adapters: bool = False,
    expected_gb: float | None = None,
) -> GpuMemory:
    return check_budget(
        total_gb=total_gb,
        parameters=PARAMETERS,
        workers=workers,
        engine=EngineConfig(dtype="bfloat16", **(engine or {})),  # type: ignore[arg-type]
        trainer=TrainerConfig(dtype="bfloat16", **(trainer or {})),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_model_parallel_size=ranks),
        algorithm=AlgorithmConfig(),
        weights=WeightConfig(transport=transport),
        adapters=adapters,
        expected_gb=expected_gb,
    )


def test_the_turns_are_added_up_from_the_settings() -> None:
    found = shares(140, engine={"memory_fraction": 0.5})
    assert found == GpuMemory(engines=70, staging=14, published=0, trainer=7 * (2 + 4 + 4 + 8))
    assert (found.engine_turn_gb, found.trainer_turn_gb(1)) == (84 + CONTEXT_GB, 126 + CONTEXT_GB)
    assert (
        shares(140, engine={"memory_fraction": 0.5, "staging_mb": 2048}, trainer={"memory_gb": 40}).staging
        == 2
    )
    for place in ("host", "layers"):
        assert shares(140, engine={"memory_fraction": 0.5, "staging": place}).staging == 0
    assert shares(140, engine={"memory_fraction": 0.5}, adapters=True).trainer == 14
    assert shares(140, engine={"name": "sglang", "memory_fraction": 0.5}) == found
    assert shares(140, engine={"name": "megatron", "buffer_size_gb": 3}).engines == 14 + 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"total_gb": 140, "engine": {"memory_fraction": 0.9}},
            ("126.0 for 1 engine", "engine.memory_fraction", "14.0 staging"),
        ),
        (
            {"total_gb": 140, "workers": 2, "engine": {"memory_fraction": 0.5}},
            ("140.0 for 2 engine", "28.0 staging"),
        ),
        (
            {"total_gb": 80, "engine": {"memory_fraction": 0.5}},
            ("trainer's turn", "126.0 for training", "trainer.memory_gb", "[parallel]"),
        ),
        (
            {"total_gb": 140, "engine": {"memory_fraction": 0.5}, "trainer": {"memory_gb": 139}},
            ("139.0 for training (trainer.memory_gb)",),
        ),
        (
            {"total_gb": 140, "engine": {"memory_fraction": 0.5}, "transport": "ipc"},
            ("28.0 published (weights.transport ipc)",),
        ),
    ],
)
def test_budget_that_does_not_fit_is_refused_with_settings_and_numbers(
    given: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as error:
        shares(**given)  # type: ignore[arg-type]
    assert [word for word in words if word not in str(error.value)] == []


def test_ranks_share_the_trainers_state_and_what_is_published() -> None:
    found = shares(140, engine={"memory_fraction": 0.5}, ranks=2, transport="ipc")
    assert (found.trainer, found.published) == (63, 14)


def test_the_expected_peak_stands_for_the_state_unless_memory_is_given() -> None:
    engine: dict[str, object] = {"memory_fraction": 0.5}
    assert shares(140, engine=engine, expected_gb=100).trainer == 100
    assert shares(140, engine=engine, expected_gb=100, trainer={"memory_gb": 40}).trainer == 40
    with pytest.raises(SettingsError, match=r"139\.0 for training \(the expected peak of a step\)"):
        shares(140, engine=engine, expected_gb=139)
