"""Makes an algorithm by name. Its module, and with it torch, is imported when it is chosen."""

import pkgutil

from protocol.choices import checked_name
from protocol.errors import SettingsError
from trainer.algorithms.base import Algorithm
from trainer.config import AlgorithmConfig

ALGORITHMS = {
    "dr_grpo": "trainer.algorithms.dr_grpo:DrGrpo",
    "grpo": "trainer.algorithms.grpo:Grpo",
}
"""Algorithm -> its class, which takes an `AlgorithmConfig`."""


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that `config` names.

    Raises:
        SettingsError: no algorithm has that name, or a coefficient is out of its range.
    """
    path = ALGORITHMS[checked_name(config.name, ALGORITHMS, "setting algorithm.name:")]
    if not 0 <= config.clip_low < 1:
        raise SettingsError(f"algorithm.clip_low {config.clip_low}: must be at least 0 and below 1")
    for name in ("clip_high", "importance_cap", "advantage_eps", "kl_coef", "length_normalizer"):
        if getattr(config, name) < 0:
            raise SettingsError(f"algorithm.{name} {getattr(config, name)}: must not be negative")
    algorithm: Algorithm = pkgutil.resolve_name(path)(config)
    return algorithm
