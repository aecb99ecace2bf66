"""Tests that the pieces of all context ranks together compute what one rank computes for whole sequences."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.context_division import Division
from trainer.data.prefix_tree import PrefixTree, find_families, single_row_families
from trainer.layers.attention.joined import joined_attention
from trainer.layers.attention.kernels import Kernel, by_segments, kernel_for, key_uses
from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import ComputedTokens, KeyUse, pieces_with_padding, visible_keys
from trainer.megatron.layers.attention.rotary import Rotary, packed_sequences

FREQUENCIES = torch.tensor([1.0, 0.5, 0.1, 0.01])
LENGTHS = [40, 3, 25, 7, 1, 12]


def tree_of(division: Division) -> PrefixTree:
    """The stretches of sequences that share no tokens."""
    lengths: dict[int, int] = {}
    for piece in (piece for own in division.pieces for piece in own):
        lengths[piece.sequence] = max(piece.stop, lengths.get(piece.sequence, 0))
    return PrefixTree.of(single_row_families([lengths[sequence] for sequence in sorted(lengths)]))


def share_of(
    division: Division,
    rank: int,
    tree: PrefixTree,
    inputs: torch.Tensor,
    terms: AttentionTerms,
    use: KeyUse | None = None,
) -> PackedSequences:
    """The sequences of a rank whose queries are like `inputs`."""
    kind = inputs.device.type, inputs.dtype
    use = use or key_uses(*kind, [terms])[0]
    return packed_sequences(
        [piece.tokens for piece in pieces_with_padding(division, rank)],
        [Rotary(FREQUENCIES.to(inputs.device))],
        torch.float32,
        [visible_keys(division, rank, tree, use)],
        segmented=kernel_for(*kind, terms) is by_segments,
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
        share = share_of(division, rank, tree_of(division), qkv[0], terms)
        found = kernel(queries[rank], torch.cat(keys), torch.cat(values), share, terms)
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
def test_fused_kernels_align_queries_with_the_last_keys(fused: Kernel, ranks: int, window: int) -> None:
    lengths = [900, 300, 40, 7, 512]
    inputs = qkv(sum(lengths), "cuda", torch.bfloat16)
    assert_equal(fused, inputs, lengths, ranks, window, 0.05)


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
        keys, pieces = visible_keys(division, rank, tree_of(division)), pieces_with_padding(division, rank)
        assert keys.tokens is not None
        seen = gathered[keys.tokens].split([piece.stop for piece in pieces])
        for piece, one in zip(division.pieces[rank], seen, strict=False):
            assert one.tolist() == list(range(starts[piece.sequence], starts[piece.sequence] + piece.stop))
        assert keys.starts.tolist() == [piece.start for piece in pieces]
        assert torch.equal(keys.offsets.diff(), torch.tensor([piece.stop for piece in pieces]))
        whole = [lengths[piece.sequence] for piece in division.pieces[rank]]
        assert keys.whole.tolist()[: len(whole)] == whole
        assert keys.longest == max(piece.stop for piece in pieces)


def tree_attention(
    kernel: Kernel,
    inputs: list[torch.Tensor],
    rows: list[list[int]],
    ranks: int,
    terms: AttentionTerms,
    use: KeyUse | None = None,
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
        share = share_of(division, rank, tree, inputs[0], terms, use)
        gathered = (x[torch.cat(padded)] for x in inputs[1:3])
        found = kernel(inputs[0][padded[rank]], *gathered, share, terms, *inputs[3:])
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
    kernel: Kernel,
    rows: list[list[int]],
    ranks: int,
    terms: AttentionTerms,
    atol: float,
    *,
    device: str = "cpu",
    use: KeyUse | None = None,
    whole_kernel: Kernel | None = None,
) -> None:
    """Values and gradients equal whole sequences', which `whole_kernel` computes, by default the same."""
    inputs = qkv(1 + max(map(max, rows)), device, torch.float64 if device == "cpu" else torch.bfloat16)
    if terms.sinks:
        inputs.append(torch.randn(4).to(inputs[0]).requires_grad_())
    whole = packed_sequences(
        list(map(len, rows)),
        [Rotary(FREQUENCIES.to(device))],
        torch.float32,
        segmented=(whole_kernel or kernel) is by_segments,
    )
    flat = torch.tensor([token for row in rows for token in row], device=device)
    expected = (whole_kernel or kernel)(*(x[flat] for x in inputs[:3]), whole, terms, *inputs[3:])
    found = tree_attention(kernel, inputs, rows, ranks, terms, use)
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
        AttentionTerms(sinks=True),
        AttentionTerms(window=9, sinks=True),
        AttentionTerms(softcap=0.7, scale=0.3),
    ],
    ids=["plain", "window-1", "window-9", "sinks", "window-and-sinks", "softcap"],
)
def test_stretches_see_what_whole_sequences_do(ranks: int, terms: AttentionTerms) -> None:
    # bounded scores are computed in float32
    assert_trees_equal(by_segments, TREE, ranks, terms, 1e-5 if terms.softcap else 1e-12)


@dataclass(frozen=True)
class PlainPart:
    """Attention with a matrix of all scores, of queries and keys with numbers: a sequence's are equal."""

    queries: torch.Tensor
    keys: torch.Tensor
    behind: torch.Tensor | None
    """Place of each query's own key, behind which it sees none; None: it sees all."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        seen = self.queries[:, None] == self.keys
        if self.behind is not None:
            seen &= torch.arange(len(self.keys)) <= self.behind[:, None]
        return torch.einsum("qhd,khd->hqk", q, k).div(q.size(-1) ** 0.5).masked_fill(~seen, -torch.inf)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, v = self.scores(q, k), v.repeat_interleave(q.size(1) // v.size(1), 1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = q.size(1) // k.size(1)
        shares = (self.scores(q, k) - total[..., None]).exp()
        products = torch.einsum("qhd,khd->hqk", out_grad, v.repeat_interleave(heads, 1))
        slopes = shares * (products - (out_grad * out).sum(-1).t()[..., None]) / q.size(-1) ** 0.5
        k_grad = torch.einsum("hqk,qhd->khd", slopes, q).unflatten(1, (-1, heads)).sum(2)
        v_grad = torch.einsum("hqk,qhd->khd", shares, out_grad).unflatten(1, (-1, heads)).sum(2)
        return torch.einsum("hqk,khd->qhd", slopes, k.repeat_interleave(heads, 1)), k_grad, v_grad


def by_plain_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PackedSequences, terms: AttentionTerms
) -> torch.Tensor:
    """What the fused kernel does, in plain torch."""

    def numbers(offsets: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())

    assert sequences.keys is not None
    own = PlainPart(numbers(sequences.offsets), numbers(sequences.key_offsets), sequences.keys.queries)
    calls = sequences.keys.shared
    shared = [PlainPart(numbers(call.query_offsets), numbers(call.key_offsets), None) for call in calls]
    return joined_attention(q, k, v, sequences.keys, own, shared)


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Rows of which each begins as an earlier one does, and then has tokens of its own."""
    rows, token = [[*range(draw(st.integers(1, 12)))]], 12
    for _ in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from(rows))
        more = draw(st.integers(0, 6))
        rows.append(before[: draw(st.integers(1, len(before)))] + [*range(token, token + more)])
        token += more
    return rows


@settings(deadline=None, max_examples=60)
@given(trees(), st.sampled_from([1, 2, 3]), st.sampled_from([None, 0.0, 0.5, 1.0, 2.5]))
def test_keys_are_copied_or_attended_to_apart(
    rows: list[list[int]], ranks: int, query_cost: float | None
) -> None:
    use = KeyUse(query_cost)
    assert_trees_equal(
        by_plain_parts, rows, ranks, AttentionTerms(), 1e-12, use=use, whole_kernel=by_segments
    )


def test_keys_are_attended_to_apart_where_copies_cost_more() -> None:
    rows = [[*range(40), *range(first, first + 10)] for first in range(40, 80, 10)]
    (family,) = find_families([torch.tensor(row).numpy() for row in rows], [0] * 4, cost=0.0)
    tree = PrefixTree.of([family])
    division = Division.of(tree.lengths, 1)
    apart, copied = (visible_keys(division, 0, tree, KeyUse(cost)) for cost in (3.9, 4.0))
    assert (apart.tokens, [call.sizes for call in apart.shared]) == (None, [((40, 40),)])
    assert (copied.offsets.tolist(), copied.shared) == ([0, 40, 90, 140, 190, 240], ())
    windowed = visible_keys(division, 0, tree, KeyUse(window=6))
    assert windowed.offsets.diff().tolist() == [40, 15, 15, 15, 15]


DEEP = [[*range(300), *range(first, first + 200)] for first in range(300, 1900, 200)]
DEEP += [[*range(400), *range(2000, 2100)], [*range(120)], [*range(450), *range(2100, 2150)]]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("terms", [AttentionTerms(window=50), AttentionTerms(window=50, sinks=True)])
def test_fused_kernels_see_the_stretches_before(fused: Kernel, ranks: int, terms: AttentionTerms) -> None:
    assert_trees_equal(fused, DEEP, ranks, terms, 0.1, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("query_cost", [None, 0.0, 2.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_fused_kernels_attend_apart(fused: Kernel, ranks: int, query_cost: float | None, sinks: bool) -> None:
    terms = AttentionTerms(sinks=sinks)
    assert_trees_equal(fused, DEEP, ranks, terms, 0.1, device="cuda", use=KeyUse(query_cost))


@pytest.mark.gpu
@pytest.mark.parametrize("query_cost", [0.0, 2.5])
def test_trees_in_16_bits_are_about_as_near_float64_as_rows_are(fused: Kernel, query_cost: float) -> None:
    """A row's output is rounded once; a joined one also in each of its parts, which kernels return so."""
    rows = [[*range(600), *range(first, first + 300)] for first in range(600, 3000, 300)]
    rows += [[*range(700), *range(3000, 3100)], [*range(750), *range(3100, 3150)]]
    exact = results_of(by_segments, rows, torch.float64, "cpu")
    packed, tree = (
        results_of(fused, rows, torch.bfloat16, "cuda", use) for use in (None, KeyUse(query_cost))
    )
    for wanted, by_rows, by_tree in zip(exact, packed, tree, strict=True):
        errors = [(found.cpu().double() - wanted).norm() for found in (by_rows, by_tree)]
        assert errors[1] <= 1.6 * errors[0]


def results_of(
    kernel: Kernel, rows: list[list[int]], dtype: torch.dtype, device: str, use: KeyUse | None = None
) -> list[torch.Tensor]:
    """Attention of all rows' tokens and its gradients, as a tree where `use` is given."""
    leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in qkv(1 + max(map(max, rows)))]
    flat = torch.tensor([token for row in rows for token in row], device=device)
    if use is None:
        rotary, lengths = Rotary(FREQUENCIES.to(device)), list(map(len, rows))
        whole = packed_sequences(lengths, [rotary], torch.float32, segmented=kernel is by_segments)
        out = kernel(*(x[flat] for x in leaves), whole, AttentionTerms())
    else:
        out = tree_attention(kernel, leaves, rows, 1, AttentionTerms(), use)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
