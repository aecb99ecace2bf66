"""Computes per-token losses, and corrections for tokens sampled by another policy.

The dtype is the dtype of the arguments, float32 in training. Every function works per token and does not
reduce. Values are finite for finite arguments. The algorithm applies the weights and sums.

Corrections have no gradient. Shapes: k trained tokens. A ratio is pi / pi_behaviour, where pi is the
trainer's policy at the start of the step.
"""

import math
from collections.abc import Callable

import torch

from trainer.functional.shapes import FloatK, IntK

MAX_LOG_RATIO = 20.0
"""|log ratio| beyond which a ratio is constant. exp(20) = 5e8 keeps products finite in float32."""

NO_ADVANTAGE = 1e-6
"""Largest |advantage| that counts as a rounding error, for example in a group with equal rewards."""


def probability_ratio(logprobs: FloatK, old_logprobs: FloatK) -> FloatK:
    """Return r = exp(logprobs - old_logprobs), [k].

    The exponent is clamped to +-`MAX_LOG_RATIO`; beyond the clamp the gradient is 0.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: FloatK, advantages: FloatK, clip_low: float, clip_high: float
) -> tuple[FloatK, FloatK]:
    """Return PPO's clipped surrogate loss.

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate edges as in DAPO (arXiv 2503.14476), eq. 8.

    Args:
        ratio: [k], pi / pi_old, with gradient.
        advantages: [k].

    Returns:
        (loss, clipped), both [k]. `clipped` is 1 where the clipped branch is smaller and the advantage is
        not 0: the clip zeroes the gradient.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    clipped = (bounded < plain) & (advantages.abs() > NO_ADVANTAGE)
    return -torch.minimum(plain, bounded), clipped.to(ratio.dtype)


def cispo_loss(
    ratio: FloatK, logprobs: FloatK, advantages: FloatK, clip_low: float, clip_high: float
) -> tuple[FloatK, FloatK]:
    """Return CISPO's loss, which clips the importance weight and keeps the gradient of every token.

        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi,  sg: stop gradient

    MiniMax-M1 (arXiv 2506.13585), section 3.1.

    Args:
        ratio: [k], pi / pi_old.
        logprobs: [k], log pi, with gradient.
        advantages: [k].

    Returns:
        (loss, clipped), both [k]: `clipped` is 1 where the weight was clipped.
    """
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, (weight != ratio.detach()).to(ratio.dtype)


def k1_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k1 = log pi - log pi_ref, [k]: an unbiased estimate of KL(pi || pi_ref) with high variance.

    As a loss, k1 has no effect on average: the expectation of its gradient is 0. Schulman, "Approximating KL
    divergence" (2020).
    """
    return logprobs - reference_logprobs


def k2_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k2 = (log pi - log pi_ref)^2 / 2, [k].

    A biased estimate of KL(pi || pi_ref) with an unbiased gradient, for tokens sampled from pi. Schulman,
    "Approximating KL divergence" (2020).
    """
    return (logprobs - reference_logprobs).square() / 2


def k3_kl(logprobs: FloatK, reference_logprobs: FloatK) -> FloatK:
    """Return k3 = q - log q - 1 with q = pi_ref / pi, [k]: never negative.

    An unbiased estimate of KL(pi || pi_ref) for tokens sampled from pi. Schulman, "Approximating KL
    divergence" (2020); DeepSeekMath (arXiv 2402.03300), eq. 4.
    """
    log_q = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_q.exp() - log_q - 1.0


def clipped_value_loss(
    values: FloatK, old_values: FloatK, returns: FloatK, clip: float
) -> tuple[FloatK, FloatK]:
    """Return the clipped loss of a critic. The clip bounds the change of the values within a batch.

        loss = max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2

    Schulman et al. 2017 (arXiv 1707.06347), section 5, L^VF; clip as in OpenAI Baselines, ppo2.

    Args:
        values: [k], with gradient.
        old_values: [k], at the start of the step.
        returns: [k].
        clip: largest change of a value; 0 disables the clip.

    Returns:
        (loss, clipped), both [k]. `clipped` is 1 where the clipped branch is larger, which zeroes the
        gradient.
    """
    plain = (values - returns).square() / 2
    if not clip:
        return plain, torch.zeros_like(plain)
    moved = (values - old_values).clamp(-clip, clip)
    bounded = (old_values + moved - returns).square() / 2
    return torch.maximum(plain, bounded), (bounded > plain).to(values.dtype)


OverSamples = Callable[[torch.Tensor], torch.Tensor]
"""[k] -> sum over the trained tokens of each token's sample, [k]."""


def ratio_at_level(log_ratio: FloatK, level: str, over_samples: OverSamples) -> FloatK:
    """Return the ratio of each token or of each token's sample, [k], without gradient.

    Args:
        log_ratio: log(pi / pi_behaviour) of each token.
        level: `token`; `sequence`, the product over the sample's trained tokens; or `geometric`, the
            geometric mean over these tokens. Exponents are clamped to +-`MAX_LOG_RATIO`.
        over_samples: sums an array over the tokens of each sample.
    """
    log_ratio = log_ratio.detach()
    if level != "token":
        total = over_samples(log_ratio)
        log_ratio = total if level == "sequence" else total / over_samples(torch.ones_like(total))
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weight(log_ratio: FloatK, level: str, cap: float, over_samples: OverSamples) -> FloatK:
    """Return the weight min(ratio, cap), [k].

    Truncated importance sampling: Ionides 2008. As the correction between the two old policies of decoupled
    PPO: Hilton et al. 2021 (arXiv 2110.00641), eq. 5, and AReaL (arXiv 2505.24298), eq. 5. At level
    `sequence`, the weight is unbiased up to the cap and has a higher variance.
    """
    return ratio_at_level(log_ratio, level, over_samples).clamp_max(cap)


def interpolated_logprobs(logprobs: FloatK, behaviour_logprobs: FloatK, lags: IntK) -> FloatK:
    """Return log pi_proximal = log pi_behaviour + a (log pi - log pi_behaviour), [k].

        a = (v_proximal - v_behaviour) / (v - v_behaviour) = lag / (lag + 1)

    The interpolation saves a forward pass of the policy at the start of the step, v_proximal. It assumes that
    v_proximal lies between the version that sampled the token and the version v = v_proximal + 1 in training.
    Tokens of lag 0 were sampled by v_proximal. A-3PO: Li et al. 2025 (arXiv 2512.06547), log-linear
    interpolation.

    Args:
        logprobs: under the policy in training.
        behaviour_logprobs: under the policy that sampled each token.
        lags: versions between sampling and the step.
    """
    share = lags / (lags + 1)
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


def log_ratio_limit(squares: FloatK, budget: float) -> float:
    """Return the largest cap of |log ratio| that keeps the second moment within the budget.

        max tau with mean(min(|log ratio|, tau)^2) <= budget; infinite if no cap is needed

    Second-moment trust region: M2PO, Zheng et al. 2025 (arXiv 2510.01161). The authors' code uses the next
    smaller |log ratio| of a token, which clips the same tokens. A cap above `MAX_LOG_RATIO` is returned as
    infinite.

    Args:
        squares: log(pi / pi_behaviour)^2 of the tokens that leave the trust region, from all ranks.
        budget: positive.
    """
    moments = squares.double().sort().values
    count = len(moments)
    if not count or float(moments.mean()) <= budget:
        return math.inf
    smaller = moments.cumsum(0) - moments
    # tau^2 if this token and all larger ones were capped
    caps = (count * budget - smaller) / torch.arange(count, 0, -1, device=moments.device)
    tau = math.sqrt(float(caps[caps <= moments][0]))
    return tau if tau < MAX_LOG_RATIO else math.inf


def leaves_trust_region(log_ratio: FloatK, advantages: FloatK) -> torch.Tensor:
    """Return where the gradient increases |log ratio|, bool [k]: A > 0, ratio > 1 or A < 0, ratio < 1."""
    return log_ratio.sign() * advantages > NO_ADVANTAGE


def keep_mask(log_ratio: FloatK, level: str, low: float, high: float, over_samples: OverSamples) -> FloatK:
    """Return 1 where the ratio is between `low` and `high`, else 0, [k].

    Masked importance sampling. Per token: IcePop (Ling team, arXiv 2510.18855). Per sequence and by geometric
    mean: Liu et al. 2025, "When speed kills stability".
    """
    ratio = ratio_at_level(log_ratio, level, over_samples)
    return ((ratio >= low) & (ratio <= high)).to(log_ratio.dtype)
