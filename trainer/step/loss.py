"""Computes the loss of a micro-batch, identically in every backend.

The algorithm computes the loss of each token (`trainer/algorithms/`). This module computes the weighted sum.
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
    """Return the micro-batch's share of the update's loss, and the micro-batch's vector of measurements.

    Args:
        algorithm: algorithm of the run.
        measures: measures of the update.
        tokens: the k trained tokens, on the device.
        logprobs: float32 [k], with gradient.
        entropy: float32 [k], nats; with gradient if the algorithm uses entropy.
    """
    if tokens.start_logprobs is None:  # first update of the step, or the start policy is not needed
        tokens = replace(tokens, start_logprobs=logprobs.detach())
    if tokens.decoupled:
        tokens = replace(tokens, proximal_logprobs=_proximal(algorithm, tokens, logprobs))
    if tokens.entropy_coef is None:
        tokens = replace(tokens, entropy_coef=algorithm.config.entropy_coef)
    terms = algorithm.token_loss(tokens, logprobs, entropy if tokens.entropy_coef else None)
    loss = (terms.loss * tokens.weights).sum()
    # adding an empty sum keeps the graph to the parameters if the micro-batch trains no token
    loss = loss + 0.0 * logprobs.sum()
    return loss, measures.measure(tokens, loss.detach(), terms, logprobs.detach(), entropy.detach())


def _proximal(algorithm: Algorithm, tokens: TrainedTokens, logprobs: torch.Tensor) -> torch.Tensor | None:
    if algorithm.config.proximal_policy == "interpolated":
        return interpolated_logprobs(logprobs, tokens.behaviour_logprobs, tokens.lags)
    return tokens.start_logprobs
