"""Tests token log-probabilities and entropies against log_softmax, by value and by gradient."""

import math

import pytest
import torch

from trainer.functional import logprobs as module
from trainer.functional.logprobs import token_logprobs


def plain(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    return log_p.gather(-1, tokens[:, None])[:, 0], entropy


def test_token_logprobs_by_hand() -> None:
    # p = (1/4, 3/4) at temperature 1; at temperature 1/2 the odds square: (1/10, 9/10)
    logits, tokens = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1])
    logprobs, entropy = token_logprobs(logits, tokens)
    assert logprobs.tolist() == [pytest.approx(math.log(3 / 4), abs=1e-6)]
    assert entropy[0].item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), abs=1e-6)
    assert token_logprobs(logits, tokens, 0.5)[0].item() == pytest.approx(math.log(0.9), abs=1e-6)


@pytest.mark.parametrize("slice_elements", [1, 14, 1 << 24])
def test_token_logprobs_and_gradients_equal_log_softmax(
    slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(15, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    tokens = torch.randint(7, (15,), generator=generator)
    mix = torch.randn(2, 15, dtype=torch.float64, generator=generator)
    for logits, function in ((ours, token_logprobs), (theirs, plain)):
        logprobs, entropy = function(logits, tokens, 0.7)
        (mix[0] * logprobs + mix[1] * entropy).sum().backward()
    torch.testing.assert_close(token_logprobs(ours, tokens, 0.7), plain(theirs, tokens, 0.7))
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_token_logprobs_passes_gradcheck() -> None:
    logits = torch.randn(
        4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    tokens = torch.tensor([1, 2, 3, 0])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, tokens, 1.3), (logits,))


@pytest.mark.parametrize("impossible", [-math.inf, -1e9])
def test_token_logprobs_of_impossible_tokens_stay_finite(impossible: float) -> None:
    logits = torch.zeros(1, 4)
    logits[..., 3] = impossible
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    (logprobs + entropy).sum().backward()
    assert entropy[0].item() == pytest.approx(math.log(3))
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 3] == 0


def test_token_logprobs_of_bfloat16_logits_are_float32() -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.zeros(4, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        logprobs, plain(logits.detach().float(), torch.zeros(4, dtype=torch.int64), 1.0)[0]
    )


def test_token_logprobs_of_no_tokens_are_empty_and_have_a_gradient() -> None:
    logits = torch.randn(0, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert logits.grad is not None
