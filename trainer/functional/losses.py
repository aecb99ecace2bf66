"""Per-token losses. Nothing here reduces: weights and sums are the algorithm's business. dtype: that of the
arguments, float32 in training.

Every function works position by position; what stands outside the loss mask is computed like the rest and
means nothing, but stays finite for finite arguments, so that a weight of 0 removes it.
"""

import torch

from trainer.functional.shapes import FloatNL

MAX_LOG_RATIO = 20.0
"""|log ratio| beyond which a ratio is held constant: exp(20) = 5e8 stays finite in float32 whatever it is
multiplied with."""


def probability_ratio(logprobs: FloatNL, old_logprobs: FloatNL) -> FloatNL:
    """r = exp(logprobs - old_logprobs), [n, L]; the exponent is clamped to +-`MAX_LOG_RATIO`, where the
    gradient vanishes."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: FloatNL, advantages: FloatNL, clip_low: float, clip_high: float
) -> tuple[FloatNL, FloatNL]:
    """The clipped surrogate of PPO as a loss.

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; two different edges as in DAPO (arXiv 2503.14476), eq. 8.

    Args:
        ratio: [n, L], pi / pi_old; gradients flow through it.
        advantages: [n, L].

    Returns:
        (loss, clipped), both [n, L]: `clipped` is 1 where the clipped branch is the smaller one, so that no
        gradient flows.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).to(ratio.dtype)


def truncated_importance_weight(
    proximal_logprobs: FloatNL, behaviour_logprobs: FloatNL, cap: float
) -> FloatNL:
    """Truncated importance sampling: w = min(pi_proximal / pi_behaviour, cap), [n, L], without gradient.

    Ionides 2008; as the correction between the decoupled PPO objective's two old policies: Hilton et al. 2021
    (arXiv 2110.00641), eq. 5, and AReaL (arXiv 2505.24298), eq. 5.
    """
    return probability_ratio(proximal_logprobs, behaviour_logprobs).clamp_max(cap).detach()


def k3_kl(logprobs: FloatNL, reference_logprobs: FloatNL) -> FloatNL:
    """Estimate of KL(pi || pi_ref) from one sampled token: k3 = q - log q - 1 with q = pi_ref / pi, [n, L];
    never negative.

    Schulman, "Approximating KL divergence" (2020); DeepSeekMath (arXiv 2402.03300), eq. 4. Unbiased for
    tokens drawn from pi.
    """
    log_q = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_q.exp() - log_q - 1.0
