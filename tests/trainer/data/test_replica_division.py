"""Tests that replicas have as much to do, and that samples stay together where that saves more."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.prefix_tree import RowFamily
from trainer.data.replica_division import ReplicaDivision


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
