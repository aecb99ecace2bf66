"""Tests log-probabilities and entropies of the output layer; test_layouts.py has those of several ranks."""

import pytest
import torch

from trainer.layers import head, softmax_torch
from trainer.layers.head import linear_logprobs, linear_logprobs_no_grad


def made(rows: int = 5, width: int = 4, vocabulary: int = 11, padding: int = 0) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary + padding, width, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same by autograd over the whole table."""
    logits = hidden.float() @ weight.float().t()
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    table = torch.log_softmax(logits / temperature, -1)
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("chunk_bytes", "kept_bytes"), [(1, 0), (100, 0), (100, 1 << 20), (1 << 20, 1 << 20)]
)
def test_values_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, temperature: float, padding: int, chunk_bytes: int, kept_bytes: int
) -> None:
    monkeypatch.setitem(head.LOGITS_CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setitem(head.LOGITS_KEPT_BYTES, "cpu", kept_bytes)
    hidden, weight, targets = made(padding=padding)
    slopes = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))
    expected = plain(hidden, weight[:11], targets, temperature)
    wanted = torch.autograd.grad((expected[0] * slopes[0] + expected[1] * slopes[1]).sum(), (hidden, weight))
    got = linear_logprobs(hidden, weight, targets, vocabulary=11, temperature=temperature)
    gradients = torch.autograd.grad((got[0] * slopes[0] + got[1] * slopes[1]).sum(), (hidden, weight))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients, wanted, atol=2e-6, rtol=1e-5)
    assert (gradients[1][11:] == 0).all()


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_bias_has_the_values_and_gradients_of_a_biased_layer(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setitem(head.LOGITS_KEPT_BYTES, "cpu", kept_bytes)
    hidden, weight, targets = made(padding=3)
    bias = torch.linspace(-1, 1, len(weight), requires_grad=True)
    slopes = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))
    table = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias)[:, :11] / 0.6, -1)
    expected = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    sources = (hidden, weight, bias)
    wanted = torch.autograd.grad((expected[0] * slopes[0] + expected[1] * slopes[1]).sum(), sources)
    got = linear_logprobs(hidden, weight, targets, vocabulary=11, temperature=0.6, bias=bias)
    gradients = torch.autograd.grad((got[0] * slopes[0] + got[1] * slopes[1]).sum(), sources)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients, wanted, atol=2e-6, rtol=1e-5)
    alone = linear_logprobs_no_grad(hidden, weight, targets, vocabulary=11, temperature=0.6, bias=bias)
    torch.testing.assert_close(alone, expected[0].detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, 0.0), (0.6, 0.0), (0.7, 1.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_alone_are_the_same_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, temperature: float, softcap: float, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(head.LOGITS_CHUNK_BYTES, "cpu", chunk_bytes)
    hidden, weight, targets = made(padding=3)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    before = hidden.detach().clone(), weight.detach().clone()
    of_head = {"vocabulary": 11, "temperature": temperature, "softcap": softcap}
    expected, _ = linear_logprobs(hidden, weight, targets, **of_head)
    found = linear_logprobs_no_grad(hidden, weight, targets, **of_head)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-6)
    assert torch.equal(hidden, before[0])
    assert torch.equal(weight, before[1])
    assert linear_logprobs_no_grad(hidden[:0], weight, targets[:0], **of_head).shape == (0,)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_bounded_logits_have_the_values_and_gradients_of_their_tanh(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setitem(head.LOGITS_KEPT_BYTES, "cpu", kept_bytes)
    hidden, weight, targets = made(padding=3)
    slopes = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))
    expected = plain(hidden, weight[:11], targets, 0.7, softcap=1.5)
    wanted = torch.autograd.grad((expected[0] * slopes[0] + expected[1] * slopes[1]).sum(), (hidden, weight))
    got = linear_logprobs(hidden, weight, targets, vocabulary=11, temperature=0.7, softcap=1.5)
    gradients = torch.autograd.grad((got[0] * slopes[0] + got[1] * slopes[1]).sum(), (hidden, weight))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_flow_through_one_output_alone(index: int) -> None:
    hidden, weight, targets = made()
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[index].sum(), hidden)
    got = torch.autograd.grad(linear_logprobs(hidden, weight, targets, vocabulary=11)[index].sum(), hidden)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_a_frozen_weight_has_no_gradient() -> None:
    hidden, weight, targets = made()
    weight.requires_grad_(False)
    linear_logprobs(hidden, weight, targets, vocabulary=11)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_is_computed_in_float32() -> None:
    hidden, weight, targets = (x.detach().bfloat16() if x.is_floating_point() else x for x in made())
    hidden.requires_grad_()
    logprobs, entropies = linear_logprobs(hidden, weight, targets, vocabulary=11)
    table = torch.log_softmax((hidden @ weight.t()).float(), -1)
    torch.testing.assert_close(logprobs, table.gather(-1, targets[:, None])[:, 0], atol=1e-6, rtol=1e-6)
    assert entropies.dtype is torch.float32
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert gradient.dtype is torch.bfloat16


def test_no_token_has_no_loss_and_gradients_of_zero() -> None:
    hidden, weight, _ = made(rows=0)
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), vocabulary=11)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert logprobs.shape == (0,)
    assert (gradients[1] == 0).all()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    hidden = logits.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(
        hidden, torch.eye(3), torch.tensor([0, 2]), vocabulary=3, temperature=0.5
    )
    (gradient,) = torch.autograd.grad((logprobs + entropies).sum(), hidden)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(entropies, torch.tensor([0.0, 3.0]).clamp(min=1).log())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_fused_kernels_equal_plain_torch(dtype: torch.dtype, softcap: float) -> None:
    from trainer.layers import softmax_triton

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(33, 10_007, generator=generator)).to(dtype).cuda()
    local = torch.randint(0, 10_000, (33,), generator=generator).cuda()
    mine = (torch.arange(33) % 3 > 0).cuda()
    of_logprobs, of_entropies = torch.randn(2, 33, generator=generator).cuda()
    wanted = softmax_torch.statistics(logits, local, 10_000, 0.7, softcap)
    torch.testing.assert_close(
        softmax_triton.statistics(logits, local, 10_000, 0.7, softcap), wanted, rtol=1e-5, atol=1e-4
    )
    normalizer = wanted[0] + wanted[1].log()
    entropies = wanted[1].log() - wanted[2] / wanted[1]
    rest = (local, mine, normalizer, entropies, of_logprobs, of_entropies, 10_000, 0.7, softcap)
    slopes, fused = logits.clone(), logits.clone()
    softmax_torch.to_slopes(slopes, *rest)
    softmax_triton.to_slopes(fused, *rest)
    torch.testing.assert_close(fused, slopes, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
