"""Tests that the pieces of all context ranks together compute what one rank computes for whole sequences."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.context_division import Division
from trainer.data.prefix_tree import PrefixTree, alone, find_families
from trainer.layers.attention.kernels import FUSED, Kernel, by_segments
from trainer.layers.attention.seen_rows import seen_rows
from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import ComputedTokens, pieces_with_padding, visible_keys
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.attention.sequences import packed_sequences

FREQUENCIES = torch.tensor([1.0, 0.5, 0.1, 0.01])
LENGTHS = [40, 3, 25, 7, 1, 12]


def tree_of(division: Division) -> PrefixTree:
    """The stretches of sequences that share no tokens."""
    lengths: dict[int, int] = {}
    for piece in (piece for own in division.pieces for piece in own):
        lengths[piece.sequence] = max(piece.stop, lengths.get(piece.sequence, 0))
    return PrefixTree.of(alone([lengths[sequence] for sequence in sorted(lengths)]))


def share_of(
    division: Division, rank: int, *, device: str = "cpu", segmented: bool = True
) -> PackedSequences:
    return packed_sequences(
        [piece.tokens for piece in pieces_with_padding(division, rank)],
        [Rotary(FREQUENCIES.to(device))],
        torch.float32,
        segmented=segmented,
        keys=visible_keys(division, rank, tree_of(division)),
    )


def places_of(division: Division, rank: int, lengths: list[int]) -> torch.Tensor:
    """Where each token of a rank, without its padding, is in the whole sequences."""
    starts = [0, *accumulate(lengths)]
    pieces = [torch.arange(p.start, p.stop) + starts[p.sequence] for p in division.pieces[rank]]
    return torch.cat([*pieces, torch.arange(0)])


def by_ranks(
    kernel: Kernel, qkv: list[torch.Tensor], lengths: list[int], ranks: int, terms: AttentionTerms
) -> torch.Tensor:
    """The attention of every rank's tokens, with a gather that is done by hand."""
    division, device = Division.of(lengths, ranks, 2), qkv[0].device
    places = [places_of(division, rank, lengths).to(device) for rank in range(ranks)]

    def shares(x: torch.Tensor) -> list[torch.Tensor]:
        rows = [x.index_select(0, place) for place in places]
        return [torch.cat([row, row.new_ones(division.size - len(row), *x.shape[1:])]) for row in rows]

    queries, keys, values = (shares(x) for x in qkv)
    out = torch.zeros_like(qkv[0])
    for rank, place in enumerate(places):
        share = share_of(division, rank, device=device.type, segmented=kernel is by_segments)
        assert share.keys is not None
        seen = share.keys.tokens
        found = kernel(queries[rank], torch.cat(keys)[seen], torch.cat(values)[seen], share, terms)
        out = out.index_copy(0, place, found[: len(place)])
    return out


def qkv(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, 16, generator=generator, dtype=dtype).to(device).requires_grad_()
        for heads in (4, 2, 2)
    ]


def assert_equal(
    kernel: Kernel, inputs: list[torch.Tensor], lengths: list[int], ranks: int, window: int, atol: float
) -> None:
    """Values and gradients."""
    terms, device = AttentionTerms(window=window), inputs[0].device
    whole = packed_sequences(
        lengths, [Rotary(FREQUENCIES.to(device))], torch.float32, segmented=kernel is by_segments
    )
    expected, found = kernel(*inputs, whole, terms), by_ranks(kernel, inputs, lengths, ranks, terms)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=atol, rtol=0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("window", [0, 1, 9])
def test_pieces_see_what_whole_sequences_do(ranks: int, window: int) -> None:
    assert_equal(by_segments, qkv(sum(LENGTHS)), LENGTHS, ranks, window, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [0, 50])
def test_fused_kernels_align_queries_with_the_last_keys(ranks: int, window: int) -> None:
    lengths = [900, 300, 40, 7, 512]
    inputs = qkv(sum(lengths), "cuda", torch.bfloat16)
    assert_equal(FUSED["torch"], inputs, lengths, ranks, window, 0.05)


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), max_size=20), st.sampled_from([2, 3, 4]))
def test_a_piece_has_its_own_positions_and_the_keys_up_to_its_last_token(
    lengths: list[int], ranks: int
) -> None:
    division = Division.of(lengths, ranks)
    starts = [0, *accumulate(lengths)]
    gathered = torch.full((ranks * division.size,), -1)
    for rank in range(ranks):
        own = places_of(division, rank, lengths)
        gathered[rank * division.size : rank * division.size + len(own)] = own
    for rank in range(ranks):
        share, pieces = share_of(division, rank), pieces_with_padding(division, rank)
        assert share.keys is not None
        seen = gathered[share.keys.tokens].split([piece.stop for piece in pieces])
        for piece, keys in zip(division.pieces[rank], seen, strict=False):
            assert keys.tolist() == list(range(starts[piece.sequence], starts[piece.sequence] + piece.stop))
        positions = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        torch.testing.assert_close(share.angles[0].cos[:, 0, 0], positions.float().cos())
        assert torch.equal(share.keys.offsets.diff(), torch.tensor([piece.stop for piece in pieces]))
        whole = [lengths[piece.sequence] for piece in division.pieces[rank]]
        assert share.keys.whole.tolist()[: len(whole)] == whole
        assert share.longest_keys == max(piece.stop for piece in pieces)


def tree_attention(
    kernel: Kernel, inputs: list[torch.Tensor], rows: list[list[int]], ranks: int, terms: AttentionTerms
) -> torch.Tensor:
    """Attention of every row's tokens, computed once for those that rows share.

    `inputs` are of tokens by number: a token has the same query, key and value wherever it is.
    """
    (family,) = find_families([torch.tensor(row).int().numpy() for row in rows], [0] * len(rows), cost=0.0)
    tree, device = PrefixTree.of([family]), inputs[0].device
    division = Division.of(tree.lengths, ranks, 2)
    offsets = torch.tensor([0, *accumulate(family.lengths)])
    flat = torch.tensor([token for row in family.rows for token in rows[row]])
    computed = [ComputedTokens.of(offsets, tree, division, rank) for rank in range(ranks)]
    shares = [flat[one.tokens] for one in computed]
    assert sum(map(len, shares)) == family.tokens
    padded = [torch.nn.functional.pad(share, (0, division.size - len(share))).to(device) for share in shares]
    out = torch.full((len(flat), *inputs[0].shape[1:]), torch.nan, dtype=inputs[0].dtype, device=device)
    for rank, one in enumerate(computed):
        share = packed_sequences(
            [piece.tokens for piece in pieces_with_padding(division, rank)],
            [Rotary(FREQUENCIES.to(device))],
            torch.float32,
            segmented=kernel is by_segments,
            keys=visible_keys(division, rank, tree),
        )
        assert share.keys is not None
        queries, (keys, values) = inputs[0][padded[rank]], (x[torch.cat(padded)] for x in inputs[1:3])
        seen = (seen_rows(x, share.keys) for x in (keys, values))
        found = kernel(queries, *seen, share, terms, *inputs[3:])
        out = out.index_copy(0, one.row_tokens.to(device), found[one.places.to(device)])
    by_row = dict(zip(family.rows, out.split(list(family.lengths)), strict=True))
    return torch.cat([by_row[row] for row in range(len(rows))])


TREE = [
    [*range(30)],
    [*range(20), 40, 41, 42],
    [*range(20), 40, 44],
    [*range(20)],
    [*range(12), 50, 51],
    [60, 61],
]
"""Rows of which one is a prefix of another one, and one has no prefix."""


def assert_trees_equal(
    kernel: Kernel, rows: list[list[int]], ranks: int, terms: AttentionTerms, atol: float, device: str = "cpu"
) -> None:
    """Values and gradients equal whole sequences'."""
    inputs = qkv(1 + max(map(max, rows)), device, torch.float64 if device == "cpu" else torch.bfloat16)
    if terms.sinks:
        inputs.append(torch.randn(4).to(inputs[0]).requires_grad_())
    whole = packed_sequences(
        list(map(len, rows)),
        [Rotary(FREQUENCIES.to(device))],
        torch.float32,
        segmented=kernel is by_segments,
    )
    flat = torch.tensor([token for row in rows for token in row], device=device)
    expected = kernel(*(x[flat] for x in inputs[:3]), whole, terms, *inputs[3:])
    found = tree_attention(kernel, inputs, rows, ranks, terms)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=atol, rtol=0.02 if atol > 0.01 else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "terms",
    [
        AttentionTerms(),
        AttentionTerms(window=1),
        AttentionTerms(window=9),
        AttentionTerms(window=9, sinks=True),
        AttentionTerms(softcap=0.7, scale=0.3),
    ],
    ids=["plain", "window-1", "window-9", "sinks", "softcap"],
)
def test_stretches_see_what_whole_sequences_do(ranks: int, terms: AttentionTerms) -> None:
    # bounded scores are computed in float32
    assert_trees_equal(by_segments, TREE, ranks, terms, 1e-5 if terms.softcap else 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("sinks", [False, True])
def test_fused_kernels_see_the_stretches_before(ranks: int, window: int, sinks: bool) -> None:
    rows = [[*range(300), *range(first, first + 200)] for first in range(300, 1900, 200)]
    rows += [[*range(400), *range(2000, 2100)], [*range(120)]]
    terms = AttentionTerms(window=window, sinks=sinks)
    assert_trees_equal(FUSED["torch"], rows, ranks, terms, 0.1, "cuda")
