"""Computes the loss of a micro-batch, the same way in every backend.

The loss of each token is the algorithm's (`trainer/algorithms/`); the weighted sum of them is here.
"""

from dataclasses import replace

import torch

from trainer.algorithms.base import Algorithm
from trainer.batch import TrainedTokens
from trainer.functional.losses import interpolated_logprobs
from trainer.step.measures import StepMeasures


def micro_batch_loss(
    algorithm: Algorithm,
    measures: StepMeasures,
    tokens: TrainedTokens,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the micro-batch's part of the update's loss, and the vector of what was measured of it.

    Args:
        algorithm: the recipe.
        measures: how the step is measured.
        tokens: the k trained tokens, on the device.
        logprobs: float32 [k]; gradients flow through it.
        entropy: float32 [k], nats; gradients flow through it if the algorithm wants them.
    """
    if tokens.start_logprobs is None:  # the update is the step's first, or nothing compares with its start
        tokens = replace(tokens, start_logprobs=logprobs.detach())
    if tokens.decoupled:
        tokens = replace(tokens, proximal_logprobs=_proximal(algorithm, tokens, logprobs))
    if tokens.entropy_coef is None:
        tokens = replace(tokens, entropy_coef=algorithm.config.entropy_coef)
    terms = algorithm.token_loss(tokens, logprobs, entropy if tokens.entropy_coef else None)
    loss = (terms.loss * tokens.weights).sum()
    # the empty sum keeps a graph to the parameters where a micro-batch trains no token
    loss = loss + 0.0 * logprobs.sum()
    return loss, measures.measure(tokens, loss.detach(), terms, logprobs.detach(), entropy.detach())


def _proximal(algorithm: Algorithm, tokens: TrainedTokens, logprobs: torch.Tensor) -> torch.Tensor | None:
    if algorithm.config.proximal_policy == "interpolated":
        return interpolated_logprobs(logprobs, tokens.behaviour_logprobs, tokens.lags)
    return tokens.start_logprobs
