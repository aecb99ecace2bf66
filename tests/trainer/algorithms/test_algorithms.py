"""Tests the algorithms: advantages, token weights and token losses against hand-computed values."""

import dataclasses
import math

import pytest
import torch

from protocol.errors import SettingsError
from protocol.validation import validated
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from trainer.algorithms import Algorithm, AlgorithmConfig, make_algorithm
from trainer.algorithms.registry import ALGORITHMS
from trainer.batch import Batch, TrainedTokens, trained_tokens


def algorithm(name: str = "grpo", **values: float) -> Algorithm:
    return make_algorithm(AlgorithmConfig(name=name, **values))


def batch(name: str = "grpo", **values: float) -> Batch:
    """Two samples of 1 and 4 tokens; the second has an inserted token and a late one."""
    spec = GroupSpec(
        samples=[SampleSpec([5], [2], 1.0), SampleSpec([5, 6, 7, 8], [0, 2, 2, 2], 0.0, mask=[1, 1, 0, 1])]
    )
    return batch_of([(scored(spec), 1)], step=2, algorithm=algorithm(name, **values))


def test_grpo_weights_are_means_over_sampled_tokens_then_samples() -> None:
    # the late token keeps its share of 1/3 and gives it to no other
    torch.testing.assert_close(batch().weights, torch.tensor([1 / 2, 1 / 6]))
    assert trained_tokens(batch()).weights.tolist() == batch().weights[[0, 1, 1]].tolist()


def test_dr_grpo_weights_are_constant() -> None:
    torch.testing.assert_close(batch("dr_grpo").weights, torch.tensor([1 / 6, 1 / 6]))
    torch.testing.assert_close(batch("dr_grpo", length_normalizer=10).weights, torch.tensor([1 / 20, 1 / 20]))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_weights_have_the_bits_that_they_always_had(name: str) -> None:
    sampled = torch.tensor([0, 1, 3, 7, 2**24 + 1, 123_456_789])
    divisor = len(sampled) * (sampled.clamp_min(1) if name == "grpo" else sampled.max().expand(6))
    weights = algorithm(name).sample_weights(sampled)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, torch.ones(6) / divisor)


def test_advantages_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    torch.testing.assert_close(
        algorithm(advantage_eps=0.5).advantages(rewards, groups), torch.tensor([0.5, -0.5])
    )
    torch.testing.assert_close(algorithm("dr_grpo").advantages(rewards, groups), torch.tensor([0.5, -0.5]))


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def one_token(behaviour: float, advantage: float, **arrays: torch.Tensor) -> TrainedTokens:
    """One trained token, of one sample."""
    tokens = trained_tokens(batch())
    return dataclasses.replace(
        tokens,
        sample=torch.tensor([0]),
        samples=1,
        behaviour_logprobs=row(behaviour),
        advantages=row(advantage),
        **arrays,
    )


def test_token_loss_without_extras_is_the_clipped_surrogate_against_the_behaviour() -> None:
    got = algorithm().token_loss(one_token(math.log(0.2), 1.0), row(math.log(0.4)))
    assert (got.loss.item(), got.ratio.item(), got.clipped.item()) == (
        pytest.approx(-1.2),
        pytest.approx(2.0),
        1.0,
    )


def test_token_loss_is_decoupled_with_proximal_logprobs() -> None:
    # ratio to the proximal policy 1.1 (not clipped), weight min(0.6 / 0.2, 2) = 2
    tokens = one_token(math.log(0.2), 1.0, proximal_logprobs=row(math.log(0.6)))
    arguments = (tokens, row(math.log(0.66)))
    got = algorithm().token_loss(*arguments)
    assert got.loss.item() == pytest.approx(-2.2, rel=1e-5)
    off = algorithm(importance_cap=0.0).token_loss(*arguments)
    assert off.loss.item() == pytest.approx(-1.1, rel=1e-5)


def test_token_loss_adds_entropy_bonus_and_kl() -> None:
    made = algorithm(entropy_coef=0.1, kl_coef=0.5)
    tokens = one_token(0.0, 0.0, reference_logprobs=row(math.log(0.5)))
    got = made.token_loss(tokens, row(0.0), row(2.0))
    assert got.loss.item() == pytest.approx(-0.2 + 0.5 * (0.5 + math.log(2) - 1))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_sum_does_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    made, recipe = batch(name), algorithm(name)

    def loss(samples: list[int]) -> torch.Tensor:
        tokens = trained_tokens(made.select(torch.tensor(samples)))
        logprobs = torch.full_like(tokens.behaviour_logprobs, -0.9)
        terms = recipe.token_loss(tokens, logprobs)
        return (terms.loss * tokens.weights).sum()

    torch.testing.assert_close(loss([0]) + loss([1]), loss([1, 0]))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"'grop' is not known; did you mean 'grpo'\?"):
        make_algorithm(AlgorithmConfig(name="grop"))


@pytest.mark.parametrize(("field", "value"), [("clip_low", 1.0), ("clip_high", -0.1), ("kl_coef", -1.0)])
def test_a_coefficient_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(SettingsError, match=f"setting {field}: {value} is not"):
        validated(AlgorithmConfig, {field: value})
