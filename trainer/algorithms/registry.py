"""Algorithms by name."""

from collections.abc import Callable

from protocol.choices import checked_name
from protocol.errors import SettingsError
from trainer.algorithms.base import Algorithm
from trainer.algorithms.dr_grpo import DrGrpo
from trainer.algorithms.grpo import Grpo
from trainer.config import ALGORITHMS, AlgorithmConfig

_MAKERS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": Grpo, "dr_grpo": DrGrpo}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config` names.

    Raises:
        SettingsError: if there is none of that name, or a coefficient is out of its range.
    """
    make = _MAKERS[checked_name(config.name, ALGORITHMS, "setting algorithm.name:")]
    if not 0 <= config.clip_low < 1:
        raise SettingsError(f"algorithm.clip_low {config.clip_low}: must be at least 0 and below 1")
    for name in ("clip_high", "importance_cap", "advantage_eps", "kl_coef", "length_normalizer"):
        if getattr(config, name) < 0:
            raise SettingsError(f"algorithm.{name} {getattr(config, name)}: must not be negative")
    return make(config)
