"""Tests that attention by segments is torch's attention on each sequence alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.megatron.layers.attention.segmented import segmented_attention, segments_of

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
