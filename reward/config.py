"""Section `[reward]`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """One verifier of the reward."""

    name: str = "exact_match"
    """Module in `reward/verifiers/`, or, with a dot, a module of your own with the same interface. Each at
    most once."""
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    """The verifier's own options."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Section `[reward]`. The reward of a sample is the weighted sum of its scores."""

    verifiers: tuple[VerifierConfig, ...] = (VerifierConfig(),)
    """May be empty where the environment itself gives the reward."""
    environment_weight: float = 1.0
    """Weight of the environment's own reward, if it gives one."""
    timeout_s: float = 30.0
    """For one verifier on one response. Exceeding it fails the group's score; the worker process is
    replaced."""
    start_timeout_s: float = 120.0
    """For a worker process to import its verifiers."""
    workers: int = 2
    """Worker processes, which is also how many groups are scored at once."""
    memory_mb: int = 4096
    """Address space of a worker process, MiB; 0 is no limit."""
