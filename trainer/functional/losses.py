"""Computes per-token losses, and corrections for tokens that another policy sampled.

The dtype is the arguments', float32 in training. Every function works token by token, and its values are
finite for finite arguments.

No function reduces: the algorithm has the weights and the sum. Corrections have no gradient. Shapes: k
trained tokens. A ratio is pi / pi_behaviour, pi being the trainer's policy as the step starts.
"""

import math
from collections.abc import Callable

import torch

from trainer.functional.shapes import FloatK, IntK

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


OverSamples = Callable[[torch.Tensor], torch.Tensor]
"""[k] -> for each token the sum over the trained tokens of its sample, [k]."""


def level_ratio(log_ratio: FloatK, level: str, over_samples: OverSamples) -> FloatK:
    """Return the ratio of each token, or of its sample, [k].

    Args:
        log_ratio: log(pi / pi_behaviour) of each token.
        level: token; sequence, the product over the sample's trained tokens; or geometric, their geometric
            mean. Exponents are clamped to +-`MAX_LOG_RATIO`.
        over_samples: adds up over samples.
    """
    log_ratio = log_ratio.detach()
    if level != "token":
        total = over_samples(log_ratio)
        log_ratio = total if level == "sequence" else total / over_samples(torch.ones_like(total))
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weight(log_ratio: FloatK, level: str, cap: float, over_samples: OverSamples) -> FloatK:
    """Return the weight min(ratio, cap), [k].

    Truncated importance sampling: Ionides 2008; as the correction between the decoupled PPO objective's two
    old policies: Hilton et al. 2021 (arXiv 2110.00641), eq. 5, and AReaL (arXiv 2505.24298), eq. 5. At the
    level of the sequence it is unbiased up to the cap, and of higher variance.
    """
    return level_ratio(log_ratio, level, over_samples).clamp_max(cap)


def interpolated_logprobs(logprobs: FloatK, behaviour_logprobs: FloatK, lags: IntK) -> FloatK:
    """Return log pi_proximal = log pi_behaviour + a (log pi - log pi_behaviour), [k].

        a = (v_proximal - v_behaviour) / (v - v_behaviour) = lag / (lag + 1)

    The policy at the start of the step, v_proximal, is taken to lie on the line between the one that sampled
    the token and the one that the step makes, v = v_proximal + 1, so that no pass has to compute it. A token
    of lag 0 was sampled by it. A-3PO: Li et al. 2025 (arXiv 2512.06547), log-linear interpolation.

    Args:
        logprobs: under the present policy.
        behaviour_logprobs: under the one that sampled each token.
        lags: versions from there to the step.
    """
    share = lags / (lags + 1)
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


def log_ratio_limit(squares: FloatK, budget: float) -> float:
    """Return the largest cap of |log ratio| that keeps the second moment within the budget.

        the largest tau with mean(min(|log ratio|, tau)^2) <= budget; infinite if no cap is needed

    Second-moment trust region: M2PO, Zheng et al. 2025 (arXiv 2510.01161). The authors' code takes the next
    smaller |log ratio| of a token, which clips the same tokens. A cap beyond `MAX_LOG_RATIO` is none.

    Args:
        squares: log(pi / pi_behaviour)^2 of the tokens that leave the trust region, of all ranks.
        budget: positive.
    """
    moments = squares.double().sort().values
    count = len(moments)
    if not count or float(moments.mean()) <= budget:
        return math.inf
    smaller = moments.cumsum(0) - moments
    # tau^2 if every token from this one on were capped
    caps = (count * budget - smaller) / torch.arange(count, 0, -1, device=moments.device)
    tau = math.sqrt(float(caps[caps <= moments][0]))
    return tau if tau < MAX_LOG_RATIO else math.inf


def leaves_region(log_ratio: FloatK, advantages: FloatK) -> torch.Tensor:
    """Return where the gradient moves a policy further away, bool [k]: A > 0, ratio > 1; A < 0, ratio < 1."""
    return log_ratio.sign() * advantages > NO_ADVANTAGE


def kept_tokens(log_ratio: FloatK, level: str, low: float, high: float, over_samples: OverSamples) -> FloatK:
    """Return 1 where the ratio is between `low` and `high`, else 0, [k].

    Masked importance sampling: IcePop (Ling team, arXiv 2510.18855) by token; Liu et al. 2025, "When speed
    kills stability", by sequence and by geometric mean.
    """
    ratio = level_ratio(log_ratio, level, over_samples)
    return ((ratio >= low) & (ratio <= high)).to(log_ratio.dtype)
