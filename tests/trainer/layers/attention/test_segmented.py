"""Tests that attention by segments is torch's attention on each sequence alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.layers.attention.segmented import segmented_attention, segments_of

CPU = torch.device("cpu")


def attention_one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float | None = None
) -> torch.Tensor:
    found = []
    for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads = (x.transpose(0, 1)[None] for x in one)
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def qkv(tokens: int, heads: int, kv_heads: int, head_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, count, head_dim, generator=generator).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("lengths", [[1], [7] * 5, [90, 71, 70, 50, 12, 11, 9, 4, 3, 1], [3, 60, 1, 58, 20]])
@pytest.mark.parametrize(("heads", "kv_heads", "scale"), [(4, 2, None), (3, 3, 0.3)])
def test_values_and_gradients_equal_each_sequence_alone(
    lengths: list[int], heads: int, kv_heads: int, scale: float | None
) -> None:
    inputs = qkv(sum(lengths), heads, kv_heads)
    expected = attention_one_by_one(*inputs, lengths, scale)
    found = segmented_attention(*inputs, segments_of(lengths, CPU), scale)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 90])
def test_a_window_leaves_each_token_itself_and_the_nearest_before_it(window: int) -> None:
    lengths = [90, 71, 12, 11, 9, 4, 1]
    inputs = qkv(sum(lengths), 4, 2)
    found = segmented_attention(*inputs, segments_of(lengths, CPU), None, window)
    q, k, v = (x.detach() for x in inputs)
    first = 0
    for length in lengths:
        for token in range(first, first + length):
            seen = slice(max(first, token - window + 1), token + 1)
            keys, values = (x[seen].repeat_interleave(2, 1) for x in (k, v))
            shares = torch.softmax(torch.einsum("hd,khd->hk", q[token], keys) / 8**0.5, -1)
            expected = torch.einsum("hk,khd->hd", shares, values)
            torch.testing.assert_close(found[token], expected, atol=1e-6, rtol=0)
        first += length


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_every_token_has_one_place_and_little_is_padded(lengths: list[int]) -> None:
    lengths.sort(reverse=True)
    segments, tokens = segments_of(lengths, CPU), torch.arange(sum(lengths))
    placed = []
    for segment in segments:
        own = tokens[segment.first : segment.first + segment.tokens]
        if segment.padded is not None and segment.places is not None:
            assert segment.padded.shape == (segment.sequences * segment.longest,)
            own = own[segment.padded][segment.places]
        placed.append(own)
        padding = segment.sequences * segment.longest - segment.tokens
        assert padding <= segment.sequences * max(8, segment.longest // 4)
    assert torch.equal(torch.cat(placed), tokens)
    assert sum(segment.sequences for segment in segments) == len(lengths)


def test_many_short_sequences_are_few_calls() -> None:
    lengths = sorted((index % 12 + 1 for index in range(256)), reverse=True)
    assert len(segments_of(lengths, CPU)) <= 2


@pytest.mark.parametrize("window", [0, 5])
def test_sinks_take_attention_and_give_nothing(window: int) -> None:
    lengths = [30, 27, 12, 11, 4, 1]
    inputs = [*qkv(sum(lengths), 4, 2), torch.tensor([-1.0, 0.5, 2.0, 30.0], requires_grad=True)]
    *tensors, sinks = inputs
    found = segmented_attention(*tensors, segments_of(lengths, CPU), None, window, sinks=sinks)
    expected = []
    for q, k, v in zip(*(x.split(lengths) for x in tensors), strict=True):
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = torch.ones(len(q), len(q)).tril().triu(1 - (window or len(q))).bool()
        scores = (torch.einsum("qhd,khd->hqk", q, keys) / 8**0.5).masked_fill(~seen, -torch.inf)
        column = sinks[:, None, None].expand(-1, len(q), 1)
        shares = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        expected.append(torch.einsum("hqk,khd->qhd", shares, values))
    wanted = torch.cat(expected)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(wanted, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(found, inputs, upstream), gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=3e-6, rtol=0)


def test_values_may_be_narrower_than_keys() -> None:
    lengths = [9, 8, 2]
    q, k, v = qkv(sum(lengths), 4, 4)
    whole = segmented_attention(q, k, v, segments_of(lengths, CPU), None)
    found = segmented_attention(q, k, v[..., :5], segments_of(lengths, CPU), None)
    torch.testing.assert_close(found, whole[..., :5], atol=1e-6, rtol=0)
