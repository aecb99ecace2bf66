"""Corrects for tokens that another policy sampled: weights, and which tokens are left out. Without gradient.

Shapes: k trained tokens. A ratio is pi / pi_behaviour, pi being the trainer's policy as the step starts.
"""

import math
from collections.abc import Callable

import torch

from trainer.functional.losses import MAX_LOG_RATIO, NO_ADVANTAGE
from trainer.functional.shapes import FloatK, IntK

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
