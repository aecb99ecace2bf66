"""Tests that a tree of stretches holds the tokens of its rows, and no more of them than pays."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.prefix_tree import KEYS_COST, PrefixTree, RowFamily, find_families, single_row_families

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12)
"""Few different tokens: rows that begin alike are frequent, to any depth."""


def families_of(
    rows: list[list[int]], groups: list[int] | None = None, cost: float = KEYS_COST
) -> list[RowFamily]:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    return find_families(arrays, groups or [0] * len(rows), cost)


def unpacked(rows: list[list[int]], families: list[RowFamily]) -> tuple[dict[int, list[int]], list[int]]:
    """The tokens of each row as its stretches hold them, and all that are computed."""
    tree = PrefixTree.of(families)
    order = [row for family in families for row in family.rows]
    packed = [rows[order[s.row]][s.start : s.stop] for s in tree.stretches]
    by_row: dict[int, list[int]] = {row: [] for row in order}
    for stretch, through in enumerate(tree.rows_through()):
        assert through
        for row in through:
            assert len(by_row[order[row]]) == tree.stretches[stretch].start
            by_row[order[row]] += packed[stretch]
    return by_row, [token for tokens in packed for token in tokens]


@settings(deadline=None)
@given(ROWS, st.integers(1, 3), st.sampled_from([0.0, 1 / 16, 0.5, 100.0]))
def test_a_tree_holds_every_token_of_its_rows(rows: list[list[int]], groups: int, cost: float) -> None:
    families = families_of(rows, [row % groups for row in range(len(rows))], cost)
    by_row, computed = unpacked(rows, families)
    assert by_row == dict(enumerate(rows))
    assert len(computed) == sum(family.tokens for family in families)


@settings(deadline=None)
@given(ROWS)
def test_sharing_without_a_cost_computes_each_prefix_once(rows: list[list[int]]) -> None:
    (family,) = families_of(rows, cost=0.0)
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert family.tokens == len(prefixes)


@settings(deadline=None)
@given(ROWS, st.integers(1, 20), st.integers(1, 5))
def test_parts_keep_to_the_limit_and_repeat_the_path(rows: list[list[int]], limit: int, most: int) -> None:
    (family,) = families_of(rows, cost=0.0)
    parts = list(family.cut(limit, most))
    by_row, _ = unpacked(rows, parts)
    assert by_row == dict(enumerate(rows))
    assert [row for part in parts for row in part.rows] == [*family.rows]
    for part in parts:
        assert len(part.rows) <= most
        assert part.tokens <= limit or len(part.rows) == 1
        assert PrefixTree.of([part]).lengths == [] or sum(PrefixTree.of([part]).lengths) == part.tokens


def test_a_prompt_is_shared_if_its_copies_take_more_than_attending_to_it() -> None:
    def tokens(prompt: int, response: int, rows: int) -> int:
        group = [[7] * prompt + [row] * response for row in range(rows)]
        return families_of(group)[0].tokens

    assert tokens(256, 700, 8) == 256 + 8 * 700
    assert tokens(20, 700, 8) == 8 * 720
    assert tokens(30, 700, 8) == 30 + 8 * 700


def test_a_tree_of_branches_has_each_stretch_behind_its_parent() -> None:
    rows = [[1] * 9, [1] * 6 + [2] * 3, [1] * 6 + [2] * 2 + [3] * 4, [1] * 4 + [5] * 2, [1] * 6]
    families = families_of(rows)
    assert families[0].tokens == 6 + 3 + 2 + 1 + 4 + 2
    tree = PrefixTree.of(families)
    assert [(s.start, s.stop, s.parent) for s in tree.stretches] == [
        (0, 4, -1), (4, 6, 0), (6, 9, 1), (6, 8, 1), (8, 9, 3), (8, 12, 3), (4, 6, 0),
    ]  # fmt: skip
    assert [families[0].rows[row] for row in tree.rows_through()[1]] == [4, 0, 1, 2]
    assert tree.path(5) == [0, 1, 3, 5]
    assert tree.ends == (1, 2, 4, 5, 6)
    assert tree.is_shared
    assert not PrefixTree.of(single_row_families([3, 0, 5])).is_shared


def test_a_token_with_other_experts_is_another_one() -> None:
    tokens = np.array([4, 4, 4, 4], dtype=np.int16)
    rows = [np.stack([tokens, experts], 1) for experts in ([1, 1, 1, 1], [1, 1, 2, 1])]
    (family,) = find_families([row.astype(np.int16) for row in rows], [0, 0])
    assert family.shared == (0, 2)
