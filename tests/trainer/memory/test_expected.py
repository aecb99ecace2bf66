"""Tests which budget is chosen, and which settings are named where none fits."""

import pytest

from protocol.errors import SettingsError
from tests.trainer.megatron.memory.test_expected import QWEN_7B, workload
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.megatron.memory.expected import Workload, expected_memory
from trainer.memory.expected import (
    GIB,
    TOKENS_MOST,
    TOKENS_STEP,
    alternatives,
    largest_budget,
)
from trainer.memory.plan import available_bytes, planned_tokens

HOST = workload(optimizer=OptimizerConfig(cpu_offload=True))


def test_the_largest_multiple_that_fits_is_chosen() -> None:
    tokens = planned_tokens(HOST, 71 * GIB)
    assert tokens % TOKENS_STEP == 0
    assert expected_memory(HOST, tokens).peak <= 71 * GIB < expected_memory(HOST, tokens + TOKENS_STEP).peak
    assert planned_tokens(HOST, 10_000 * GIB) == TOKENS_MOST


def test_budget_that_does_not_fit_is_refused_with_the_cheapest_settings_that_would() -> None:
    with pytest.raises(SettingsError) as error:
        planned_tokens(workload(), 71 * GIB)
    text, tokens = str(error.value), largest_budget(HOST, 71 * GIB)
    assert f"expected to take {expected_memory(workload(), 1024)}, and 71.0 GiB may be used; " in text
    assert f"it would fit with optimizer.cpu_offload = true, up to {tokens} tokens" in text
    assert ', or with trainer.recompute_granularity = "full" and optimizer.cpu_offload = true, up to' in text


def test_alternatives_come_in_the_order_of_their_costs() -> None:
    both = 'trainer.recompute_granularity = "{}" and optimizer.cpu_offload = true'
    named = [names for names, _, _ in alternatives(workload(), 71 * GIB)]
    assert named == ["optimizer.cpu_offload = true", both.format("selective"), both.format("full")]
    assert [names for names, _, _ in alternatives(HOST, 50 * GIB)] == [
        f'trainer.recompute_granularity = "{name}"' for name in ("selective", "full")
    ]


def test_more_gpus_are_named_where_no_setting_fits() -> None:
    with pytest.raises(SettingsError, match=r"no setting of one rank would fit: .*\[parallel\]"):
        planned_tokens(workload(), 40 * GIB)


def test_masters_that_an_engine_reads_stay_on_the_device() -> None:
    shared = workload(shared=True)
    assert all("cpu_offload" not in names for names, _, _ in alternatives(shared, 140 * GIB))


def given(tokens: int) -> Workload:
    return workload(
        architecture=QWEN_7B,
        trainer=TrainerConfig(dtype="bfloat16", micro_batch_tokens=tokens),
        optimizer=OptimizerConfig(cpu_offload=True),
    )


def test_a_given_budget_is_kept_with_a_warning_where_it_is_tight(caplog: pytest.LogCaptureFixture) -> None:
    room = 71 * GIB
    assert planned_tokens(given(2000), room) == 2000
    assert not caplog.records
    assert planned_tokens(given(30000), room) == 30000
    assert "memory.tight tokens=30000" in caplog.text
    assert "a step may run out of memory: lower trainer.micro_batch_tokens" in caplog.text


def test_a_given_budget_is_refused_where_even_the_smallest_does_not_fit() -> None:
    with pytest.raises(SettingsError, match="does not fit"):
        planned_tokens(given(30000), 30 * GIB)
    assert largest_budget(given(30000), 30 * GIB) == 0


@pytest.mark.parametrize(
    ("settings", "free", "room"),
    [
        ({}, 80, 0.9 * 70),  # served versions are on top of what a step takes
        ({}, 30, 0.9 * 20),
        ({"memory_fraction": 0.5}, 80, 0.9 * 30),
        ({"memory_gb": 20.0}, 80, 20),  # what training takes is said
    ],
)
def test_room_of_training_leaves_room_for_served_versions(
    settings: dict[str, float], free: int, room: float
) -> None:
    assert available_bytes(TrainerConfig(**settings), free * GIB, 80 * GIB, 10 * GIB) == pytest.approx(
        room * GIB
    )
