"""Tests what is measured of a critic's step."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.groups import whole
from tests.trainer.roles.ppo_steps import ALGORITHM, command
from trainer.algorithms import make_algorithm
from trainer.backends.base import StepStats
from trainer.batch import Batch, trained_tokens
from trainer.roles.value_measures import ValueMeasures
from trainer.step.train_command import plan_command


def batch_with() -> Batch:
    batch = whole(plan_command(command(2), make_algorithm(ALGORITHM)))
    generator = torch.Generator().manual_seed(1)
    values, drawn = torch.randn(2, len(batch.tokens), generator=generator)
    return replace(batch, values=values, returns=drawn)


def stats_of(batch: Batch, values: torch.Tensor, pieces: int = 1, clip: float = 0.0) -> StepStats:
    """The statistics of a step whose micro-batches are every `pieces`-th sample."""
    measures, vectors = ValueMeasures.of_batch(batch, clip), []
    for first in range(pieces):
        chosen = torch.arange(first, len(batch.group_index), pieces)
        mine = torch.isin(batch.sample_index, chosen)
        part = batch.select(chosen)
        vectors.append(measures.micro_batch_loss(trained_tokens(part), values[mine][part.loss_mask])[1])
    return measures.stats(measures.join(vectors, torch.device("cpu")), grad_norm=0.5, skipped="")


@pytest.mark.parametrize("pieces", [1, 3])
def test_measures_are_those_of_the_whole_batch(pieces: int) -> None:
    batch = batch_with()
    assert batch.values is not None
    assert batch.returns is not None
    values = batch.values + 0.3
    stats, mask = stats_of(batch, values, pieces, clip=0.2), batch.loss_mask
    wanted, error = batch.returns[mask].double(), (batch.returns - values)[mask].double()
    explained = 1 - error.var(unbiased=False) / wanted.var(unbiased=False)
    assert stats.explained_variance == pytest.approx(explained.item(), rel=1e-5)
    assert stats.value_mean == pytest.approx(values[mask].mean().item(), rel=1e-5)
    assert stats.return_mean == pytest.approx(wanted.mean().item(), rel=1e-5)
    beyond = (batch.returns - batch.values)[mask] > 0.25  # nearer to what moved by 0.3 than to 0.2
    assert stats.value_clip_fraction == pytest.approx(beyond.double().mean().item())
    assert stats.critic_grad_norm == 0.5


def test_returns_that_are_all_alike_explain_nothing() -> None:
    batch = batch_with()
    batch = replace(batch, returns=torch.full_like(batch.advantages, 0.7))
    assert batch.values is not None
    assert stats_of(batch, batch.values).explained_variance is None


def test_a_skipped_step_is_a_warning_beside_those_of_the_policy() -> None:
    measures = ValueMeasures(tokens=1, value_clip=0.0)
    skipped = measures.stats(torch.zeros(7), grad_norm=float("inf"), skipped="the gradient is inf")
    stats = StepStats(trained_tokens=1, warnings=("slow",), memory_peak_gb=2.0).with_critic(skipped)
    assert stats.warnings == ("slow", "the critic's step was skipped: the gradient is inf")
    assert stats.memory_peak_gb == 2.0
    assert (
        ValueMeasures(tokens=0, value_clip=0.0).stats(torch.zeros(7), grad_norm=0, skipped="") == StepStats()
    )
