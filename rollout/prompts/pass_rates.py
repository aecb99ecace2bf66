"""Chooses and orders prompts by their pass rates: a curriculum that a data file holds."""

import math
from collections.abc import Sequence

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig


def within_rates(prompts: Sequence[Prompt], config: PromptConfig) -> list[Prompt]:
    """Return the prompts with a pass rate in the range of `config`, and the prompts without one.

    Raises:
        SettingsError: the range is empty, no prompt has a pass rate, or one is not a number.
    """
    low, high = config.min_pass_rate, config.max_pass_rate
    if low is not None and high is not None and low > high:
        raise SettingsError(
            f"setting prompts.min_pass_rate: {low:g} is above prompts.max_pass_rate, {high:g}"
        )
    if low is None and high is None and not config.easy_first:
        return list(prompts)
    rates = [pass_rate(prompt, config) for prompt in prompts]
    if all(rate is None for rate in rates):
        raise SettingsError(
            f"{config.path}: no row has a pass rate in the field {config.pass_rate_field!r}; `tether "
            "pass-rates` writes them, or set prompts.pass_rate_field"
        )
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    return [
        prompt for prompt, rate in zip(prompts, rates, strict=True) if rate is None or least <= rate <= most
    ]


def ease_of(prompts: Sequence[Prompt], config: PromptConfig) -> list[float] | None:
    """Return how easy each prompt is, for `Order`; None if `config` wants no such order."""
    if not config.easy_first:
        return None
    rates = [pass_rate(prompt, config) for prompt in prompts]
    return [-math.inf if rate is None else rate for rate in rates]


def pass_rate(prompt: Prompt, config: PromptConfig) -> float | None:
    """Return the pass rate of a prompt; None if its row has none.

    Raises:
        SettingsError: it is not a finite number.
    """
    value = prompt.metadata.get(config.pass_rate_field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(
            f"prompt {prompt.text[:40]!r}: the field {config.pass_rate_field!r} is {value!r}, not a number"
        )
    return float(value)
