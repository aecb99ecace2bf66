"""Tests cutting a batch between replicas and packing it into micro-batches, by property and by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import balance, fill_groups, pack, pack_padded

lengths_of_samples = st.lists(st.integers(1, 40), max_size=40)


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 6))
def test_balance_gives_every_sample_to_one_piece_and_the_dearest_piece_is_near_the_best(
    costs: list[float], pieces: int
) -> None:
    found = balance(costs, pieces)
    assert len(found) == pieces
    assert sorted(sample for piece in found for sample in piece) == list(range(len(costs)))
    assert all(piece == sorted(piece) for piece in found)
    dearest = max(sum(costs[sample] for sample in piece) for piece in found)
    # no sample is added to a piece that is above the mean
    assert dearest <= sum(costs) / pieces + max(costs, default=0) + 1e-6


def test_balance_by_hand() -> None:
    assert balance([3, 5, 4, 4], 2) == [[0, 1], [2, 3]]
    assert balance([7, 1], 3) == [[0], [1], []]


@pytest.mark.parametrize("function", [pack, pack_padded])
@given(lengths=lengths_of_samples, budget=st.integers(1, 60), most=st.integers(1, 5))
def test_micro_batches_hold_every_sample_once_within_their_limits(
    function: object, lengths: list[int], budget: int, most: int
) -> None:
    passes = function(lengths, budget, most)  # type: ignore[operator]
    assert sorted(sample for made in passes for sample in made) == list(range(len(lengths)))
    for made in passes:
        size = [lengths[sample] for sample in made]
        computed = sum(size) if function is pack else len(size) * max(size)
        assert len(made) == 1 or (computed <= budget and len(made) <= most)


@given(lengths_of_samples, st.integers(1, 60))
def test_packed_micro_batches_are_more_than_half_full(lengths: list[int], budget: int) -> None:
    passes = pack(lengths, budget, 10**6)
    room = [max(0, budget - sum(lengths[sample] for sample in made)) for made in passes]
    assert room == sorted(room) or max(lengths) > budget
    # what two of them hold together is over the budget, or first fit had put it into one
    assert all(2 * budget - a - b > budget for a, b in pairwise(sorted(room)))


def test_micro_batches_by_hand() -> None:
    assert pack([3, 9, 4, 4, 12], 10, 99) == [[4], [1], [2, 3], [0]]
    assert pack([3, 3, 3], 100, 2) == [[0, 1], [2]]
    assert pack_padded([3, 9, 4, 4, 12], 10, 99) == [[4], [1], [2, 3], [0]]
    assert pack([], 10, 9) == pack_padded([], 10, 9) == []


@given(lengths_of_samples, st.integers(1, 60), st.integers(1, 5))
def test_groups_are_filled_with_halves_and_only_then_with_nothing(
    lengths: list[int], budget: int, size: int
) -> None:
    passes = pack(lengths, budget, 10**6) or [[]]
    found = fill_groups(passes, lengths, size)
    assert len(found) % size == 0
    assert len(found) - len(passes) < size
    assert sorted(sample for made in found for sample in made) == list(range(len(lengths)))
    totals = [sum(lengths[sample] for sample in made) for made in found]
    assert totals == sorted(totals, reverse=True)
    assert max(totals) <= max(sum(lengths[sample] for sample in made) for made in passes)
    empty = sum(not made for made in found)
    assert empty == 0 or all(len(made) <= 1 for made in found)


def test_groups_by_hand() -> None:
    assert fill_groups([[0, 1], [2]], [3, 4, 5], 2) == [[0, 1], [2]]
    assert fill_groups([[0, 1, 2]], [3, 4, 5], 2) == [[0, 1], [2]]
    assert fill_groups([[0]], [3], 4) == [[0], [], [], []]
