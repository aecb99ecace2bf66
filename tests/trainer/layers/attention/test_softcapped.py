"""Tests attention with bounded scores against the formula, written out."""

import pytest
import torch

from trainer.layers.attention import softcapped
from trainer.layers.attention.segmented import segmented_attention, segments_of
from trainer.layers.attention.softcapped import softcapped_attention

CAP = 0.8


def qkv(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Compute it for one sequence."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = CAP * torch.tanh(0.3 * torch.einsum("qhd,khd->hqk", q, k) / CAP)
    place = torch.arange(len(q))
    distance = place[:, None] - place
    hidden = (distance < 0) | ((distance >= window) if window else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 28])
def test_values_and_gradients_equal_the_formula_for_any_size_of_chunks(
    monkeypatch: pytest.MonkeyPatch, window: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(softcapped, "SCORES_CHUNK_BYTES", chunk_bytes)
    lengths = [20, 18, 3]
    inputs = qkv(sum(lengths))
    pieces = zip(*(x.split(lengths) for x in inputs), strict=True)
    expected = torch.cat([written_out(*piece, window) for piece in pieces])
    found = segmented_attention(*inputs, segments_of(lengths, torch.device("cpu")), 0.3, window, CAP)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for gradient, other in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-6, rtol=0)


def test_a_mask_says_which_keys_each_sequence_attends_to() -> None:
    q, k, v = (x.detach().transpose(0, 1)[None] for x in qkv(12))
    last = q[:, :, -1:]
    mask = torch.arange(12) > 6
    found = softcapped_attention(last, k, v, scale=0.3, softcap=CAP, mask=mask[None, None, None, None])
    expected = written_out(*(x.detach() for x in qkv(12)), 5)[-1]
    torch.testing.assert_close(found[0, :, 0], expected, atol=1e-6, rtol=0)
