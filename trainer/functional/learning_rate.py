"""Computes the learning rate of a step. No torch here."""

import math

from trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, made: int) -> float:
    """Return the learning rate of the step after `made` steps.

    Linear warm-up, then as `lr_decay_style` says, `min_lr` from `lr_decay_steps` on: as in Megatron-core's
    OptimizerParamScheduler, but that the first step of the warm-up is not lost on a rate of 0.
    """
    step = made + 1
    if step <= config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    first = config.lr_warmup_steps
    if config.lr_decay_style == "WSD":
        first = config.lr_decay_steps - config.lr_wsd_decay_steps
    progress = min(max((step - first) / max(config.lr_decay_steps - first, 1), 0.0), 1.0)
    kept = (1 + math.cos(math.pi * progress)) / 2 if config.lr_decay_style == "cosine" else 1 - progress
    return config.min_lr + kept * (config.lr - config.min_lr)
