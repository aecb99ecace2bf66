"""Tests that recorded experts of another model are refused before a step."""

import pytest
import torch

from protocol.errors import TetherError
from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.experts.replay import check_recorded

EXPERTS = Experts(count=8, per_token=2, intermediate=4, dense_layers=(1,))


def test_experts_of_the_model_are_taken() -> None:
    recorded = torch.tensor([[[0, 7], [3, 4]], [[-1, -1], [1, 2]]], dtype=torch.int16)
    check_recorded(recorded, EXPERTS, 3)
    check_recorded(recorded[:0], EXPERTS, 3)  # of a replica without samples


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (None, "no engine recorded which experts it chose"),
        (torch.zeros(2, 3, 2), "2 experts of each of 3 layers, up to number 0; .* 2 of 8 in each of 2"),
        (torch.zeros(2, 2, 4), "4 experts of each of 2 layers"),
        (torch.full((2, 2, 2), 8), "up to number 8"),
    ],
)
def test_experts_of_another_model_are_refused(recorded: torch.Tensor | None, problem: str) -> None:
    with pytest.raises(TetherError, match=problem):
        check_recorded(recorded, EXPERTS, 3)
