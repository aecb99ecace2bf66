"""Tests the division of a step into mini-batches: shares, weights, order, and that no layout changes it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.groups import GroupSpec, SampleSpec, scored, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.data.mini_batches import ReplicaDivision
from trainer.data.prefix_tree import RowFamily
from trainer.step.plan import StepPlan, plan_step

STEP = 3


def plan(mini_batches: int, *, seed: int = 0, step: int = STEP, name: str = "grpo") -> StepPlan:
    """Three groups of four samples of 1 to 4 tokens; those of the last group are late."""
    groups = [
        GroupSpec(
            group=g,
            samples=[
                SampleSpec([5] * length, [step - g] * length, reward=float(length % 2))
                for length in range(1, 5)
            ],
        )
        for g in range(3)
    ]
    return plan_step(
        [(scored(spec), 1) for spec in groups],
        step=step,
        algorithm=make_algorithm(AlgorithmConfig(name=name)),
        mini_batches=mini_batches,
        seed=seed,
    )


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_each_sample_is_in_one_mini_batch_and_their_sizes_differ_by_one_at_most(count: int) -> None:
    made = plan(count).mini_batches
    sizes = made.by_sample.bincount().tolist()
    assert len(sizes) == len(made.totals) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [totals.samples for totals in made.totals]


def test_there_are_no_more_mini_batches_than_samples() -> None:
    assert len(plan(100).mini_batches.totals) == 12


def test_totals_are_those_of_the_samples() -> None:
    made = plan(5)
    batch = whole(made)
    trained = torch.zeros(12, dtype=torch.int64).index_add(0, batch.sample_index, batch.loss_mask.long())
    for number, totals in enumerate(made.mini_batches.totals):
        chosen = made.mini_batches.by_sample == number
        assert totals.trained_tokens == int(trained[chosen].sum())
        assert totals.fresh == bool(trained[chosen & (made.group_index == 0)].any())
        assert totals.lag_max == made.totals.lag_max == 1
    assert sum(totals.trained_tokens for totals in made.mini_batches.totals) == made.totals.trained_tokens


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo"])
def test_weights_are_those_of_a_batch_of_the_mini_batch_alone(name: str) -> None:
    made, one = plan(4, name=name), plan(1, name=name)
    sampled = torch.tensor([length for _ in range(3) for length in range(1, 5)])
    recipe = make_algorithm(AlgorithmConfig(name=name))
    for number in range(4):
        chosen = made.mini_batches.by_sample == number
        assert torch.equal(made.weights[chosen], recipe.sample_weights(sampled[chosen]))
    assert torch.equal(made.advantages, one.advantages)
    assert torch.equal(one.weights, recipe.sample_weights(sampled))


def test_seed_and_step_alone_decide() -> None:
    made = plan(4).mini_batches
    assert torch.equal(made.by_sample, plan(4).mini_batches.by_sample)
    assert made.by_sample.tolist() == [0, 2, 0, 1, 2, 2, 3, 3, 0, 1, 3, 1]  # in every release
    others = [plan(4, seed=1).mini_batches, plan(4, step=STEP + 1).mini_batches]
    assert not any(torch.equal(made.by_sample, other.by_sample) for other in others)


def test_an_epoch_has_each_mini_batch_once_in_an_order_of_its_own() -> None:
    made = plan(5).mini_batches
    order = made.order(4)
    epochs = [order[first : first + 5] for first in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    assert order == made.order(4)
    assert plan(1).mini_batches.order(3) == (0, 0, 0)


def _alike(lengths: torch.Tensor) -> torch.Tensor:
    return (lengths > 0).double()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_share_each_mini_batch_evenly(replicas: int) -> None:
    made = plan(3)
    pieces, imbalance = made.mini_batches.divide(made.families(shared=False), _alike, replicas)
    assert sorted(sample for piece in pieces for sample in piece) == list(range(12))
    for number in range(3):
        chosen = made.mini_batches.by_sample == number
        sizes = [sum(bool(chosen[sample]) for sample in piece) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
    assert imbalance == pytest.approx(2 * 3 / 4 - 1 if replicas == 3 else 0)


def test_the_parts_of_replicas_have_the_samples_of_a_mini_batch() -> None:
    made = plan(3)
    pieces, _ = made.mini_batches.divide(made.families(shared=True), torch.Tensor.double, 2)
    totals = made.mini_batches.totals[1]
    found = [made.part(piece).select_mini_batch(1, totals) for piece in pieces]
    assert sum(len(part.rewards) for part in found) == totals.samples
    assert sum(int(part.loss_mask.sum()) for part in found) == totals.trained_tokens
    assert all(part.totals == totals for part in found)


def tokens(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.double()


def group(first: int, rows: int, prompt: int, response: int) -> RowFamily:
    own = tuple(range(first, first + rows))
    return RowFamily(own, (prompt + response,) * rows, (0, *[prompt] * (rows - 1)))


def test_groups_stay_whole_where_there_are_enough() -> None:
    families = [group(4 * number, 4, 100, 10) for number in range(6)]
    found = ReplicaDivision.of(families, range(24), tokens, 3)
    assert found.costs == (280.0,) * 3
    assert all({row // 4 for row in piece} == {piece[0] // 4, piece[-1] // 4} for piece in found.pieces)


def test_a_group_is_cut_if_a_replica_would_have_too_much() -> None:
    found = ReplicaDivision.of([group(0, 8, 10, 100)], range(8), tokens, 4)
    assert found.costs == (210.0,) * 4
    assert sorted(map(len, found.pieces)) == [2] * 4
    kept = ReplicaDivision.of([group(0, 8, 100, 1)], range(8), tokens, 2)
    assert kept.costs == (104.0, 104.0)


def test_the_rows_of_a_sample_stay_together() -> None:
    family = RowFamily((0, 2, 1, 3), (50,) * 4, (0, 10, 10, 10))
    found = ReplicaDivision.of([family], [0, 0, 1, 1], tokens, 4)
    assert sorted(map(sorted, found.pieces)) == [[], [], [0, 1], [2, 3]]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50), st.integers(0, 50)), max_size=8),
    st.integers(1, 5),
)
def test_every_row_is_on_one_replica_and_none_has_more_than_with_groups_apart(
    groups: list[tuple[int, int, int]], replicas: int
) -> None:
    families, rows = [], 0
    for count, prompt, response in groups:
        families.append(group(rows, count, prompt, response))
        rows += count
    found = ReplicaDivision.of(families, range(rows), tokens, replicas)
    assert sorted(row for piece in found.pieces for row in piece) == list(range(rows))
    apart = [part for family in families for part in family.cut(0, 1)]
    assert max(found.costs) <= max(ReplicaDivision.of(apart, range(rows), tokens, replicas).costs) * 4 / 3
