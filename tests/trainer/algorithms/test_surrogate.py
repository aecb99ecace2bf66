"""Tests that every recipe, with every correction, has the loss and the gradient that its paper says."""

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.algorithms import naive
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.algorithms.registry import ALGORITHMS
from trainer.batch import Batch, trained_tokens
from trainer.functional.losses import leaves_trust_region, log_ratio_limit
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures

STEP, BOUND = 5, 2


@st.composite
def samples(draw: st.DrawFn) -> SampleSpec:
    """Lags from 0 to 3, of which the bound masks the last; inserted tokens; possibly nothing to train."""
    count = draw(st.integers(1, 6))
    lags = sorted((draw(st.integers(0, 3)) for _ in range(count)), reverse=True)
    return SampleSpec(
        [7] * count,
        [STEP - lag for lag in lags],
        reward=draw(st.sampled_from([0.0, 0.5, 1.0])),
        mask=[1, *(draw(st.sampled_from([1, 1, 0])) for _ in range(count - 1))],
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[SampleSpec, int | None]:
    """A row, and how many tokens of the one before it follows; None: it is a sample."""
    return draw(samples()), draw(st.one_of(st.none(), st.integers(0, 6)))


def branched(group: int, made: list[tuple[SampleSpec, int | None]]) -> GroupSpec:
    """The group of some rows, of which the first is always a sample."""
    branches: list[tuple[int, int, int]] = []
    known = 0
    for row, (spec, shared) in enumerate(made):
        if row == 0 or shared is None:
            branches.append((branches[-1][0] + 1 if branches else 0, -1, 0))
        else:
            branches.append((branches[-1][0], row - 1, min(shared, known)))
        known = branches[-1][2] + len(spec.tokens)
    return GroupSpec(group, samples=[spec for spec, _ in made], branches=branches)


def choices(field: str) -> st.SearchStrategy[Any]:
    """Return a strategy for the names that a setting of `[algorithm]` can have."""
    return st.sampled_from(get_args(get_type_hints(AlgorithmConfig)[field]))


@st.composite
def configs(draw: st.DrawFn) -> AlgorithmConfig:
    return AlgorithmConfig(
        name=draw(st.sampled_from(sorted(ALGORITHMS))),
        clip_low=draw(st.sampled_from([0.1, 0.3])),
        clip_high=draw(st.sampled_from([0.1, 0.5])),
        importance_cap=draw(st.sampled_from([0.0, 1.1])),
        importance_level=draw(choices("importance_level")),
        rejection_level=draw(choices("rejection_level")),
        rejection_low=0.8,
        rejection_high=1.3,
        entropy_coef=draw(st.sampled_from([0.0, 0.05])),
        kl_coef=draw(st.sampled_from([0.0, 0.2])),
        kl_estimator=draw(choices("kl_estimator")),
        proximal_policy=draw(choices("proximal_policy")),
        second_moment_threshold=draw(st.sampled_from([0.02, 0.2])),
        use_kl_in_reward=draw(st.booleans()),
        opd_reward_coef=draw(st.sampled_from([0.0, 0.5])),
        advantage_eps=0.01,
        length_normalizer=draw(st.sampled_from([0, 9])),
    )


def shifted(
    batch: Batch, seed: int, *, decoupled: bool, later: bool
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """The batch with policies that differ a little, and log-probabilities and entropies of the newest.

    In a `later` update that is another one than at the start of the step.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return 0.3 * torch.randn(len(batch.tokens), generator=generator, dtype=torch.float64)

    engine = -1.5 + noise()
    batch = replace(
        batch,
        behaviour_logprobs=engine.float(),
        reference_logprobs=(engine + noise()).float(),
        decoupled=decoupled,
        start_logprobs=(engine + noise()).float() if later else None,
    )
    return batch, (engine + noise()).requires_grad_(), noise().abs().requires_grad_()


def ours(
    config: AlgorithmConfig, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor, pieces: int
) -> torch.Tensor:
    """The loss over micro-batches of every `pieces`-th sample."""
    algorithm, measures = make_algorithm(config), StepMeasures.of_batch(batch, config)
    total = logprobs.new_zeros(())
    for first in range(min(pieces, len(batch.group_index))):
        chosen = torch.arange(first, len(batch.group_index), pieces)
        part = batch.select(chosen)
        place = torch.cat([torch.arange(*batch.offsets[s : s + 2].tolist()) for s in chosen.tolist()])
        mine = place[part.loss_mask]
        total = (
            total
            + micro_batch_loss(algorithm, measures, trained_tokens(part), logprobs[mine], entropy[mine])[0]
        )
    return total


@given(
    configs(),
    st.lists(st.lists(rows(), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_loss_and_gradient_are_those_of_the_paper(
    config: AlgorithmConfig,
    made: list[list[tuple[SampleSpec, int | None]]],
    seed: int,
    decoupled: bool,
    later: bool,
    pieces: int,
) -> None:
    groups = [(scored(branched(g, rows)), BOUND) for g, rows in enumerate(made)]
    plain = batch_of(groups, step=STEP, algorithm=make_algorithm(config))
    batch, logprobs, entropy = shifted(plain, seed, decoupled=decoupled, later=later)
    cap = math.inf
    if config.name == "m2po":
        moved = (logprobs.detach().float() - batch.behaviour_logprobs)[batch.loss_mask]
        leaving = moved[leaves_trust_region(moved, batch.advantages[batch.loss_mask])]
        batch = replace(
            batch, log_ratio_limit=log_ratio_limit(leaving.square(), config.second_moment_threshold)
        )
        scores = dict(enumerate(batch.advantages.tolist()))
        cap = naive.clip_of(config, batch, logprobs.tolist(), scores)
    expected = naive.step_loss(config, batch, logprobs, entropy, cap=cap)
    found = ours(config, batch, logprobs, entropy, pieces)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    if not expected.requires_grad:
        return
    of_paper, of_ours = (
        torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True, materialize_grads=True)
        for loss in (expected, found)
    )
    for theirs, gradient in zip(of_paper, of_ours, strict=True):
        torch.testing.assert_close(gradient, theirs, atol=1e-6, rtol=1e-5)
