"""Corrects for tokens that another policy sampled: weights, and which tokens are left out. Without gradient.

Shapes: k trained tokens. A ratio is pi / pi_behaviour, pi being the trainer's policy as the step starts.
"""

from collections.abc import Callable

import torch

from trainer.functional.losses import MAX_LOG_RATIO
from trainer.functional.shapes import FloatK

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


def kept_tokens(log_ratio: FloatK, level: str, low: float, high: float, over_samples: OverSamples) -> FloatK:
    """Return 1 where the ratio is between `low` and `high`, else 0, [k].

    Masked importance sampling: IcePop (Ling team, arXiv 2510.18855) by token; Liu et al. 2025, "When speed
    kills stability", by sequence and by geometric mean.
    """
    ratio = level_ratio(log_ratio, level, over_samples)
    return ((ratio >= low) & (ratio <= high)).to(log_ratio.dtype)
