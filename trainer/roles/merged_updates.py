"""Merges what the updates of a step measured into what the step measured."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.backends.base import StepStats
from trainer.backends.rank_commands import StepCommand
from trainer.backends.step_measures import StepMeasures
from trainer.config import AlgorithmConfig

OF_ALL_UPDATES = ("entropy", "clip_fraction", "ratio_mean", "reference_kl_k3")
"""Means over the tokens of all updates. What compares the policy at the start of the step with the engine's
is measured once for each token."""
JOINED: dict[str, Callable[[Any], Any]] = {
    "micro_batches": sum,
    "loss_scale_repeats": sum,
    "memory_peak_gb": max,
    "memory_expected_gb": max,
    "expert_load_max": max,
    "expert_load_min": min,
    "loss_scale": min,
}


def merged_updates(config: AlgorithmConfig, updates: Sequence[StepStats], command: StepCommand) -> StepStats:
    """Return what a step measured.

    Args:
        config: the recipe's.
        updates: what each of its updates measured, in order.
        command: the step.
    """
    made = [update for update in updates if not update.skipped]
    counts = {"updates": len(made), "updates_skipped": len(updates) - len(made)}
    if len(updates) == 1:
        return dataclasses.replace(updates[0], **counts)
    found = _measured(config, updates, command)
    tokens = [update.trained_tokens for update in updates]
    joined = {name: _joined(join, updates, name) for name, join in JOINED.items()}
    return dataclasses.replace(
        found,
        skipped="" if made else next(update.skipped for update in updates),
        loss=_mean([update.loss for update in updates], [1] * len(updates)),
        grad_norm=_mean([update.grad_norm for update in made or updates], [1] * len(made or updates)),
        padding_share=_mean([update.padding_share for update in updates], tokens),
        warnings=tuple(dict.fromkeys(text for update in updates for text in update.warnings))
        + _skips(updates, made),
        **joined,
        **counts,
    )


def _measured(config: AlgorithmConfig, updates: Sequence[StepStats], command: StepCommand) -> StepStats:
    """Return what the sums of the updates say.

    Each token is compared with the engine once: in the first epoch if its log-probabilities at the start of
    the step are known, else in the first update alone, in which the policy is still that one.
    """
    first = len(command.mini_batches) if command.start_logprobs else 1
    once = _sums(config, updates[:first], command)
    tokens = sum(totals.trained_tokens for totals in command.mini_batches)
    found = dataclasses.replace(once, trained_tokens=tokens, sums=())
    whole = _sums(config, updates, command)
    return dataclasses.replace(found, **{name: getattr(whole, name) for name in OF_ALL_UPDATES})


def _sums(config: AlgorithmConfig, updates: Sequence[StepStats], command: StepCommand) -> StepStats:
    """Return the statistics of the tokens of several updates together."""
    measured = [update for update in updates if update.sums]
    if not measured:
        return StepStats(trained_tokens=0)
    totals = [command.mini_batches[mini_batch] for mini_batch in command.updates[: len(updates)]]
    measures = StepMeasures(
        config=config,
        tokens=sum(update.trained_tokens for update in measured),
        lags=totals[0].lag_max + 1,
        truncates=any(update.importance_capped is not None for update in measured),
        refers=any(update.reference_kl_k3 is not None for update in measured),
        fresh=any(part.fresh for part in totals),
    )
    vectors = [torch.tensor(update.sums, dtype=torch.float64) for update in measured]
    return measures.stats(measures.join(vectors, torch.device("cpu")), grad_norm=0.0, skipped="")


def _joined(join: Callable[[Any], Any], updates: Sequence[StepStats], name: str) -> Any:
    values = [value for update in updates if (value := getattr(update, name)) is not None]
    return join(values) if values else None


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of what was measured."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _skips(updates: Sequence[StepStats], made: Sequence[StepStats]) -> tuple[str, ...]:
    """Return a warning if some updates of a step that changed weights were skipped."""
    skipped = [update.skipped for update in updates if update.skipped]
    if not skipped or not made:
        return ()
    return (f"{len(skipped)} of {len(updates)} updates were skipped, the last one because {skipped[-1]}",)
