"""Computes what a step measures in numpy, by formulas of its own, from log-probabilities of any origin."""

from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from trainer.backends.base import StepStats
from trainer.batch import Batch

Values = NDArray[np.float64]


def array(tensor: torch.Tensor) -> Values:
    return tensor.detach().double().numpy()


def ess(weights: Values) -> float:
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def expected(
    batch: Batch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    clip: float = 0.2,
    cap: float = 0.0,
    rejection: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Statistics of a step on a batch, flat; `logprobs` and `entropy` [t] are of the weights before it."""
    mask = batch.loss_mask.numpy()
    current, behaviour = array(logprobs)[mask], array(batch.behaviour_logprobs)[mask]
    old = current if batch.decoupled else behaviour
    advantages = array(batch.advantages)[mask]
    lags = (batch.step - batch.versions.numpy())[mask]

    def clipped(ratio: Values) -> float:
        up, down = (advantages > 0) & (ratio > 1 + clip), (advantages < 0) & (ratio < 1 - clip)
        return float((up | down).mean())

    weights = np.exp(current - behaviour)
    result = {
        "trained_tokens": len(weights),
        "entropy": float(array(entropy)[mask].mean()),
        "ratio_mean": float(np.exp(current - old).mean()),
        "clip_fraction": clipped(np.exp(current - old)),
        "behaviour_clip_fraction": clipped(weights),
        "behaviour_kl_k3": float((weights - 1 - np.log(weights)).mean()),
        "importance_mean": float(weights.mean()),
        "importance_max": float(weights.max()),
        "importance_ess": ess(weights),
    }
    if cap and old is not behaviour:
        result["importance_capped"] = float((np.exp(old - behaviour) > cap).mean())
    if rejection is not None:
        low, high = rejection
        ratio = np.exp(old - behaviour) if old is not behaviour else weights
        result["importance_rejected"] = float(((ratio < low) | (ratio > high)).mean())
    if batch.reference_logprobs is not None:
        q = np.exp(array(batch.reference_logprobs)[mask] - current)
        result["reference_kl_k3"] = float((q - 1 - np.log(q)).mean())
    fresh = np.abs(current - behaviour)[lags == 0]
    if len(fresh):
        result["logprob_error_max"] = float(fresh.max())
    counted = batch.measured.numpy()[batch.sample_index.numpy()[mask]]
    for lag in sorted(set(lags[counted].tolist())):
        chosen = counted & (lags == lag)
        errors = np.abs(current - behaviour)[chosen]
        at_lag = {
            "tokens": len(errors),
            "error_mean": float(errors.mean()),
            "error_max": float(errors.max()),
            "token_mult_prob_error": float(np.exp(errors).mean()),
            "ess": ess(weights[chosen]),
        }
        result |= {f"mismatch.{lag}.{name}": value for name, value in at_lag.items()}
        if lag == 0:
            result["mismatch_mean"], result["mismatch_max"] = at_lag["error_mean"], at_lag["error_max"]
            result["token_mult_prob_error"] = at_lag["token_mult_prob_error"]
    return result


def flat(stats: StepStats) -> dict[str, Any]:
    """What was measured, without nulls; the mismatch of lag 1 as `mismatch.1.error_mean` and so on.

    There must be no warnings.
    """
    fields = msgspec.to_builtins(stats.measured())
    assert "warnings" not in fields
    by_lag = fields.pop("mismatch", {})
    fields |= {"skipped": stats.skipped, "trained_tokens": stats.trained_tokens}
    result = {name: value for name, value in fields.items() if value is not None}
    return result | {
        f"mismatch.{lag}.{name}": value for lag, found in by_lag.items() for name, value in found.items()
    }
