"""Tests how experts are chosen and weighed."""

import pytest
import torch

from protocol.errors import TetherError
from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.experts.router import check_recorded, choose, scores_of, weights_of

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


def test_softmax_comes_before_the_choice() -> None:
    experts = Experts(count=4, per_token=2)
    scores = scores_of(LOGITS, experts)
    chosen = choose(scores, experts)
    assert chosen.tolist() == [[3, 2]]
    assert weights_of(scores, chosen, experts).tolist() == [scores[0, [3, 2]].tolist()]


def test_normalized_weights_add_up_to_the_scale() -> None:
    experts = Experts(count=4, per_token=2, normalized=True, scale=2.5)
    scores = scores_of(LOGITS, experts)
    weights = weights_of(scores, choose(scores, experts), experts)
    assert float(weights.sum()) == pytest.approx(2.5)
    assert float(weights[0, 0] / weights[0, 1]) == pytest.approx(float(torch.tensor(1.0).exp()))


def test_a_bias_changes_the_choice_alone() -> None:
    experts = Experts(count=4, per_token=1, scoring="sigmoid")
    scores = scores_of(LOGITS, experts)
    chosen = choose(scores, experts, torch.tensor([2.0, 0.0, 0.0, 0.0]))
    assert chosen.tolist() == [[0]]
    assert weights_of(scores, chosen, experts).tolist() == [[0.5]]


@pytest.mark.parametrize(("best", "expected"), [(1, [2, 3]), (2, [0, 1])])
def test_a_token_chooses_from_its_best_groups_alone(best: int, expected: list[int]) -> None:
    experts = Experts(count=6, per_token=2, groups=3, best_of_group=best)
    scores = torch.tensor([[0.5, 0.6, 0.7, 0.0, 0.1, 0.2]])
    assert sorted(choose(scores, experts)[0].tolist()) == expected


def test_groups_are_chosen_with_the_bias() -> None:
    experts = Experts(count=4, per_token=1, scoring="sigmoid", groups=2, best_of_group=2)
    bias = torch.tensor([5.0, 0.0, 0.0, 0.0])
    assert choose(scores_of(LOGITS, experts), experts, bias).tolist() == [[0]]


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
