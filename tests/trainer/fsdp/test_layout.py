"""Tests that sizes other than the sharded ranks are refused by name."""

import pytest

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.fsdp.layout import check_layout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 3),
        ("expert_model_parallel_size", 2),
        ("sequence_parallel", True),
    ],
)
def test_other_ranks_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"parallel.{field}: {value}: .* use megatron"):
        check_layout(ParallelConfig(**{field: value}))  # type: ignore[arg-type]


def test_sharded_ranks_pass() -> None:
    check_layout(ParallelConfig(data_parallel_size=8, use_distributed_optimizer=False))
