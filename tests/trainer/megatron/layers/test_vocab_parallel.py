"""Tests log-probabilities and entropies of one rank; test_layouts.py compares those of several."""

import pytest
import torch

from trainer.megatron.layers import vocab_parallel
from trainer.megatron.layers.vocab_parallel import vocab_parallel_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("slice_elements", [1, 30, 1 << 24])
def test_values_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, temperature: float, padding: int, slice_elements: int
) -> None:
    monkeypatch.setattr(vocab_parallel, "SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, 11 + padding, generator=generator)).requires_grad_()
    targets = torch.randint(0, 11, (5,), generator=generator)
    of_logprobs, of_entropies = torch.randn(2, 5, generator=generator)

    table = torch.log_softmax(logits[:, :11] / temperature, -1)
    expected = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    (wanted,) = torch.autograd.grad((expected[0] * of_logprobs + expected[1] * of_entropies).sum(), logits)

    got = vocab_parallel_logprobs(logits, targets, vocabulary=11, temperature=temperature)
    (gradient,) = torch.autograd.grad((got[0] * of_logprobs + got[1] * of_entropies).sum(), logits)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
    assert (gradient[:, 11:] == 0).all()


def test_gradients_flow_through_one_output_alone() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 6])
    for index in range(2):
        (gradient,) = torch.autograd.grad(
            vocab_parallel_logprobs(logits, targets, vocabulary=7)[index].sum(), logits
        )
        torch.testing.assert_close(gradient.sum(-1), torch.zeros(4), atol=1e-6, rtol=0)
        assert gradient.abs().max() > 0.01


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    targets = torch.tensor([0, 1, 2, 6])
    logprobs, entropies = vocab_parallel_logprobs(logits, targets, vocabulary=7)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    assert entropies.dtype is torch.float32
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    assert gradient.dtype is torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]]).requires_grad_()
    logprobs, entropies = vocab_parallel_logprobs(logits, torch.tensor([0, 2]), vocabulary=3, temperature=0.5)
    (gradient,) = torch.autograd.grad((logprobs + entropies).sum(), logits)
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(entropies, torch.tensor([0.0, 3.0]).clamp(min=1).log())
