"""Tests that a division has every token once, little padding, and attention costs that are about equal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.context_division import LARGE_SHARE, Division, SequencePiece

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 3000)), max_size=40)


def cost(pieces: tuple[SequencePiece, ...]) -> int:
    """Keys that all queries see together."""
    return sum((p.stop * (p.stop + 1) - p.start * (p.start + 1)) // 2 for p in pieces)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_every_token_is_on_one_rank_and_shares_are_equal(
    lengths: list[int], ranks: int, multiple: int
) -> None:
    division = Division.of(lengths, ranks, multiple)
    seen = sorted((p.sequence, p.start, p.stop) for own in division.pieces for p in own)
    covered = [0] * len(lengths)
    for sequence, start, stop in seen:
        assert start == covered[sequence] < stop
        covered[sequence] = stop
    assert covered == lengths
    assert len(division.pieces) == ranks
    assert division.size % multiple == 0
    tokens = [sum(p.tokens for p in own) for own in division.pieces]
    assert max(tokens) <= division.size
    assert division.padding == ranks * division.size - sum(lengths)
    assert division.padding < ranks * multiple or not sum(lengths)


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([2, 3, 4, 8]))
def test_no_rank_pays_much_more_for_attention_than_the_mean(lengths: list[int], ranks: int) -> None:
    division = Division.of(lengths, ranks)
    costs = [cost(own) for own in division.pieces]
    # half of a sequence that is just not large, for each token of a share; and what a token over costs
    more = division.size * (division.size / (2 * LARGE_SHARE) + ranks)
    assert max(costs) <= sum(costs) / ranks + more


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [[32768], [20000, 9000, 700, 300, 40], [30000] + [100] * 200, [500 + 7 * n for n in range(100)]],
    ids=["one", "several", "long-tailed", "alike"],
)
def test_attention_costs_the_same_to_two_percent_whatever_the_samples_are(
    lengths: list[int], ranks: int
) -> None:
    costs = [cost(own) for own in Division.of(lengths, ranks).pieces]
    assert max(costs) * ranks <= 1.02 * sum(costs)


def test_a_large_sequence_is_cut_to_and_fro_and_small_ones_stay_whole() -> None:
    first, second = Division.of([6, 160, 7], 2).pieces
    assert first == (SequencePiece(1, 0, 40), SequencePiece(1, 120, 160), SequencePiece(2, 0, 7))
    assert second == (SequencePiece(1, 40, 80), SequencePiece(1, 80, 120), SequencePiece(0, 0, 6))


def test_one_rank_has_the_sequences_as_they_are() -> None:
    division = Division.of([5, 0, 9], 1, 4)
    assert division == Division(((SequencePiece(0, 0, 5), SequencePiece(2, 0, 9)),), 16)
