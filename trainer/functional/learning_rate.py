"""Computes the learning rate of a step, or calls a user's schedule. Does not import torch.

    def rate(update: int, config: OptimizerConfig) -> float

`update` counts the completed updates from 0. The schedule is not called during the warm-up.
"""

import math

from protocol.choices import Entry, Registry, is_own
from protocol.errors import SettingsError
from protocol.user_code import import_attribute, located, returned_number
from trainer.config import OptimizerConfig

STYLES = Registry(
    {
        name: Entry("trainer.functional.learning_rate:learning_rate")
        for name in ("constant", "linear", "cosine", "WSD")
    },
    own=Entry,
)
"""`optimizer.lr_decay_style` -> function that computes the rate."""


def learning_rate(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of the step after `update` steps.

    Linear warm-up, then the schedule `lr_decay_style`, with `min_lr` from step `lr_decay_steps` on. Equals
    Megatron-core's OptimizerParamScheduler, except that the first warm-up step has a rate above 0.

    Raises:
        SettingsError: a user's schedule cannot be loaded, raises, or does not return a rate.
    """
    step = update + 1
    if step <= config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if is_own(config.lr_decay_style):
        return _own_rate(config, update)
    if config.lr_decay_style == "constant":
        return config.lr
    first = config.lr_warmup_steps
    if config.lr_decay_style == "WSD":
        first = config.lr_decay_steps - config.lr_wsd_decay_steps
    progress = min(max((step - first) / max(config.lr_decay_steps - first, 1), 0.0), 1.0)
    kept = (1 + math.cos(math.pi * progress)) / 2 if config.lr_decay_style == "cosine" else 1 - progress
    return config.min_lr + kept * (config.lr - config.min_lr)


def _own_rate(config: OptimizerConfig, update: int) -> float:
    setting = "setting optimizer.lr_decay_style"
    function, file = import_attribute(config.lr_decay_style, setting)
    what = f"{setting}: {config.lr_decay_style} in {file}"
    try:
        returned = function(update, config)
    except Exception as error:  # the user's code may raise anything
        raise SettingsError(f"{what} raised for update {update} at {located(error)}") from error
    try:
        rate = returned_number(returned)
    except ValueError as error:
        raise SettingsError(f"{what} returned {error} for update {update}; return a finite number") from None
    if rate < 0:
        raise SettingsError(f"{what} returned {rate:g} for update {update}; return 0 or more")
    return rate
