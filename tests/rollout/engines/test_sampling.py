"""Tests sampling in plain torch: temperature, top-k, top-p and their log-probabilities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import EngineError
from rollout.engines.base import Sampling
from rollout.engines.sampling import kept_tokens, sample, sampled_distribution


def test_sampled_distribution_applies_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert sampled_distribution(logits, Sampling(1, top_p=0.6)).exp().tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0, 0]
    )
    assert sampled_distribution(logits, Sampling(1, top_p=0.5)).exp().tolist() == pytest.approx([1, 0, 0, 0])
    assert sampled_distribution(logits, Sampling(1, top_k=3)).exp().tolist() == pytest.approx(
        [5 / 9, 2.5 / 9, 1.5 / 9, 0]
    )
    cold = sampled_distribution(logits, Sampling(1, temperature=0.5)).exp()
    assert cold.tolist() == pytest.approx((torch.tensor([0.25, 0.0625, 0.0225, 0.01]) / 0.345).tolist())
    ((token, logprob),) = sample(logits[None], [Sampling(1, temperature=0)], [torch.Generator()])
    assert token == 0
    assert logprob == pytest.approx(torch.tensor(0.5).log().item())


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_tokens_kept_in_a_batch_are_those_of_each_row(limits: list[tuple[int, float]], seed: int) -> None:
    scores = torch.randn(len(limits), 9, generator=torch.Generator().manual_seed(seed)).round(
        decimals=1
    )  # with equals
    kept = kept_tokens(scores, torch.tensor([k for k, _ in limits]), torch.tensor([p for _, p in limits]))
    for row, (k, p), found in zip(scores, limits, kept, strict=True):
        assert found.any()
        assert torch.equal(sampled_distribution(row, Sampling(1, top_k=k, top_p=p)) > -torch.inf, found)


MIXED = [
    Sampling(1, temperature=1.0),
    Sampling(1, temperature=0.0),
    Sampling(1, temperature=0.6, top_k=4),
    Sampling(1, temperature=1.3, top_p=0.7),
] * 20
"""More than are sampled together."""


def test_rows_of_a_batch_get_what_torch_draws_for_each_alone() -> None:
    logits = torch.randn(len(MIXED), 50, generator=torch.Generator().manual_seed(0))
    found = sample(logits, MIXED, [torch.Generator().manual_seed(n) for n in range(len(MIXED))])
    for n, (row, sampling, (token, logprob)) in enumerate(zip(logits, MIXED, found, strict=True)):
        expected = sampled_distribution(row, sampling)
        generator = torch.Generator().manual_seed(n)
        drawn = torch.multinomial(expected.exp(), 1, generator=generator)
        assert token == (int(drawn) if sampling.temperature else int(row.argmax()))
        assert logprob == float(expected[token])


def test_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = torch.nan
    generators = [torch.Generator(), torch.Generator()]
    with pytest.raises(EngineError, match="logits are not finite"):
        sample(logits, [Sampling(1), Sampling(1)], generators)
