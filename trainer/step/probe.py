"""Applies an algorithm to a batch without a model: advantages, weights, loss and gradient.

Shapes: N samples of the batch, k trained tokens.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from protocol.errors import SettingsError
from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array
from trainer.algorithms.base import Algorithm
from trainer.batch import TrainedTokens, trained_tokens
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures
from trainer.step.plan import StepPlan, plan_step

GROUP_COUNT = 3
"""Number of groups of a synthetic batch. All rewards of the last group are equal."""
MAX_RESPONSE_TOKENS = 12
"""Largest number of tokens of a completion."""
SEED = 28


def synthetic_groups(samples: int) -> list[ScoredRollout]:
    """Return deterministic synthetic groups of `samples` completions each, of versions 0 and 1."""
    draw = np.random.RandomState(SEED)
    return [_group(number, samples, draw) for number in range(GROUP_COUNT)]


def _group(number: int, samples: int, draw: np.random.RandomState) -> ScoredRollout:
    lengths = draw.randint(2, MAX_RESPONSE_TOKENS + 1, samples)
    total = int(lengths.sum())
    rewards = draw.rand(samples) if number + 1 < GROUP_COUNT else np.ones(samples)
    spans = [row for i, n in enumerate(lengths.tolist()) for row in ((i, 1, 0), (i, n, 1))]
    rollout = Rollout(
        group=number,
        token="made",
        engine="made",
        prompt_tokens=Array.of([3, 4, 5], "int32"),
        lengths=Array.of(lengths, "int32"),
        tokens=Array.of(draw.randint(3, 100, total), "int32"),
        logprobs=Array.of(-draw.rand(total) - 0.01, "float32"),
        loss_mask=Array.of(np.ones(total), "uint8"),
        spans=Array.of(spans, "int32"),
        finish_reasons=("stop",) * samples,
        responses=("",) * samples,
    )
    return ScoredRollout(rollout=rollout, rewards=Array.of(rewards, "float32"))


LOGPROB_NOISE = 0.1
"""Standard deviation of the difference between the policy's and the engine's log-probabilities, nats."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of an algorithm on a batch."""

    groups: int
    advantages: torch.Tensor
    """float32 [N]."""
    weights: torch.Tensor
    """float32 [N]: loss weight of each trained token of a sample."""
    loss: float
    """Sum of loss times weight over the k tokens."""
    gradient: torch.Tensor
    """float32 [k]: derivative of the loss by the log-probability of each trained token."""


def probe(algorithm: Algorithm, plan: StepPlan) -> ProbeResult:
    """Compute the loss of a planned batch under a policy that differs slightly from the engine's.

    The difference is deterministic.

    Raises:
        SettingsError: the loss or its gradient is not finite. The message names the first such token.
    """
    batch = plan.part(range(len(plan.samples)))
    if algorithm.config.kl_coef:
        batch = replace(batch, reference_logprobs=batch.behaviour_logprobs - LOGPROB_NOISE)
    tokens = trained_tokens(batch)
    noise = torch.randn(len(tokens.place), generator=torch.Generator().manual_seed(SEED))
    logprobs = (tokens.behaviour_logprobs + LOGPROB_NOISE * noise).clamp_max(0.0).requires_grad_()
    measures = StepMeasures.of_batch(batch, algorithm.config)
    loss, _ = micro_batch_loss(algorithm, measures, tokens, logprobs, -logprobs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    _check_finite(algorithm, tokens, logprobs.detach(), float(loss.detach()), gradient)
    groups = len(plan.group_index.unique())
    return ProbeResult(groups, plan.advantages, plan.weights, float(loss.detach()), gradient)


def probe_synthetic(algorithm: Algorithm, samples: int) -> ProbeResult:
    """Apply an algorithm to a small synthetic batch of groups of `samples` samples.

    Raises:
        SettingsError: the loss or gradient is not finite, or the algorithm raises or returns invalid values.
    """
    groups = [(group, 1) for group in synthetic_groups(samples)]
    return probe(algorithm, plan_step(groups, step=1, algorithm=algorithm, max_tokens=1))


def _check_finite(
    algorithm: Algorithm,
    tokens: TrainedTokens,
    logprobs: torch.Tensor,
    loss: float,
    gradient: torch.Tensor,
) -> None:
    wrong = (~torch.isfinite(gradient)).nonzero()[:, 0]
    if len(wrong):
        first = int(wrong[0])
        raise SettingsError(
            f"algorithm {algorithm.config.name}: the gradient of token_loss() is {float(gradient[first])} at "
            f"trained token {first} (log-probability {float(logprobs[first]):.4g}, the engine's "
            f"{float(tokens.behaviour_logprobs[first]):.4g}, advantage {float(tokens.advantages[first]):.4g})"
        )
    if not math.isfinite(loss):
        raise SettingsError(f"algorithm {algorithm.config.name}: the loss of token_loss() is {loss}")
