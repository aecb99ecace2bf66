"""Computes per-token losses. No function reduces: the algorithm has the weights and the sum.

The dtype is the arguments', float32 in training. Every function works token by token, and its values are
finite for finite arguments.
"""

import torch

from trainer.functional.shapes import FloatK

MAX_LOG_RATIO = 20.0
"""|log ratio| beyond which a ratio is constant: exp(20) = 5e8 stays finite in float32 when multiplied."""

NO_ADVANTAGE = 1e-6
"""Largest |advantage| that is rounding alone, as where a group's rewards are equal."""


def probability_ratio(logprobs: FloatK, old_logprobs: FloatK) -> FloatK:
    """Return r = exp(logprobs - old_logprobs), [k].

    The exponent is clamped to +-`MAX_LOG_RATIO`, where the gradient vanishes.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: FloatK, advantages: FloatK, clip_low: float, clip_high: float
) -> tuple[FloatK, FloatK]:
    """Return the clipped surrogate of PPO as a loss.

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; two different edges as in DAPO (arXiv 2503.14476), eq. 8.

    Args:
        ratio: [k], pi / pi_old; gradients flow through it.
        advantages: [k].

    Returns:
        (loss, clipped), both [k]: `clipped` is 1 where the clipped branch is the smaller one, so that no
        gradient flows, and there is an advantage that would have had one.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    clipped = (bounded < plain) & (advantages.abs() > NO_ADVANTAGE)
    return -torch.minimum(plain, bounded), clipped.to(ratio.dtype)


def cispo_loss(
    ratio: FloatK, logprobs: FloatK, advantages: FloatK, clip_low: float, clip_high: float
) -> tuple[FloatK, FloatK]:
    """Return CISPO's loss: the importance weight is clipped, and no token loses its gradient.

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi,  sg: without gradient

    MiniMax-M1 (arXiv 2506.13585), section 3.1.

    Args:
        ratio: [k], pi / pi_old.
        logprobs: [k], log pi; gradients flow through it.
        advantages: [k].

    Returns:
        (loss, clipped), both [k]: `clipped` is 1 where the weight was clipped.
    """
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, (weight != ratio.detach()).to(ratio.dtype)


def k1_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k1 = log pi - log pi_ref, [k]: unbiased for KL(pi || pi_ref), of high variance.

    As a loss it has no effect on average: the expectation of its gradient is 0. Schulman, "Approximating KL
    divergence" (2020).
    """
    return logprobs - reference_logprobs


def k2_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k2 = (log pi - log pi_ref)^2 / 2, [k].

    A biased estimate of KL(pi || pi_ref) whose gradient is unbiased, for tokens drawn from pi. Schulman,
    "Approximating KL divergence" (2020).
    """
    return (logprobs - reference_logprobs).square() / 2


def k3_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k3 = q - log q - 1 with q = pi_ref / pi, [k]: never negative.

    It estimates KL(pi || pi_ref) from one sampled token, unbiased for tokens drawn from pi. Schulman,
    "Approximating KL divergence" (2020); DeepSeekMath (arXiv 2402.03300), eq. 4.
    """
    log_q = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_q.exp() - log_q - 1.0


def clipped_value_loss(
    values: FloatK, old_values: FloatK, returns: FloatK, clip: float
) -> tuple[FloatK, FloatK]:
    """Return the loss of a critic, which bounds how far a batch moves its values.

        loss = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Schulman et al. 2017 (arXiv 1707.06347), section 5, L^VF; its clip as in their implementation (OpenAI
    Baselines, ppo2).

    Args:
        values: [k]; gradients flow through it.
        old_values: [k], at the start of the step.
        returns: [k].
        clip: 0 is off.

    Returns:
        (loss, clipped), both [k]: `clipped` is 1 where the clipped branch is the larger one, so that no
        gradient flows.
    """
    plain = (values - returns).square() / 2
    if not clip:
        return plain, torch.zeros_like(plain)
    moved = (values - old_values).clamp(-clip, clip)
    bounded = (old_values + moved - returns).square() / 2
    return torch.maximum(plain, bounded), (bounded > plain).to(values.dtype)
