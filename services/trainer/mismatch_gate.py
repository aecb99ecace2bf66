"""Judges by what a step measured whether engine and trainer still compute the same policy."""

from trainer.backends.base import StepStats
from trainer.config import TrainerConfig


def excess_mismatch(step: int, stats: StepStats, config: TrainerConfig) -> str:
    """Return what is wrong with the mismatch of a step at lag 0, as a sentence; empty if nothing is.

    Steps whose tokens all have a larger lag are not judged: there the policy may have moved.
    """
    error, limit = stats.token_mult_prob_error, config.mismatch_limit
    if error is None or not limit or error <= limit:
        return ""
    return (
        f"step {step}: engine and trainer disagree on tokens of the same weights, "
        f"token_mult_prob_error {error:.4g} is over trainer.mismatch_limit {limit:g}; "
        "compare their dtypes, sampling settings and model code (docs/metrics.md)"
    )
