"""Tests the chi-square test of sampled tokens, with tokens that torch draws."""

import pytest
import torch

from rollout.engines.contract.distribution import BINS, places, uniformity

VOCAB, COUNT = 32, 2000


def drawn(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Distributions [COUNT, VOCAB], each another, and a token of each, drawn by torch."""
    logprobs = (2 * torch.randn(COUNT, VOCAB, generator=generator)).log_softmax(-1)
    return logprobs, torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_the_distribution_are_uniform(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert uniformity(places(*drawn(generator), generator)) > 1e-4


def test_the_p_value_of_a_known_statistic() -> None:
    counts = torch.full((BINS,), 100)
    counts[0], counts[1] = 130, 70  # (30 ** 2 + 30 ** 2) / 100 = 18; tables: P(chi2 with 15 > 18) = 0.2627
    middles = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    assert uniformity(middles.repeat_interleave(counts)) == pytest.approx(0.2627, abs=1e-4)


def test_a_rare_token_that_is_drawn_too_often_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, tokens = drawn(generator)
    wrong = torch.rand(COUNT, generator=generator) < 0.1
    tokens[wrong] = logprobs[wrong].argmin(-1)
    assert uniformity(places(logprobs, tokens, generator)) < 1e-9


def test_another_temperature_is_found() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, tokens = drawn(generator)
    assert uniformity(places((logprobs * 1.25).log_softmax(-1), tokens, generator)) < 1e-9


def test_equally_probable_tokens_have_places_of_their_own() -> None:
    logprobs = torch.zeros(4, 4).log_softmax(-1)
    found = places(logprobs, torch.arange(4), torch.Generator().manual_seed(3))
    assert ((found * 4).long() == torch.arange(4)).all()
