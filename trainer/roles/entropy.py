"""Adapts the entropy bonus of a run to a target, after each step and across checkpoints."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from protocol.errors import SettingsError
from trainer.backends.base import StepStats
from trainer.config import AlgorithmConfig
from trainer.storage.host_state import HostState


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """State of the adaptive entropy bonus."""

    coef: float
    """c, the coefficient while the entropy is below the target."""
    active: bool = True
    """Whether the previous step's entropy was at most the target."""

    @classmethod
    def first(cls, config: AlgorithmConfig) -> "EntropyBonus":
        """Return the bonus of the first step."""
        return cls(config.entropy_coef)

    @property
    def in_force(self) -> float:
        """Coefficient of the next step."""
        return self.coef if self.active else 0.0

    def after(self, entropy: float | None, config: AlgorithmConfig) -> "EntropyBonus":
        """Return the bonus after a step.

            c' = clip(c + delta, 0, max) if e < target else clip(c - delta, 0, max)
            the bonus is c' if e <= target, else 0

        Skywork-OR1: He et al. 2025 (arXiv 2505.22312), adaptive entropy control. The paper measures e by a
        pass before the step; here e is the previous step's entropy, without an extra pass.

        Args:
            entropy: mean over the trained tokens of the step, nats; None: not measured, the bonus stays.
        """
        if entropy is None:
            return self
        delta = config.entropy_coef_delta if entropy < config.entropy_target else -config.entropy_coef_delta
        coef = min(max(self.coef + delta, 0.0), config.entropy_coef_max)
        return EntropyBonus(coef, entropy <= config.entropy_target)


FILE = "entropy.json"
"""File in a checkpoint; rank 0 writes the file, and every rank reads it."""


class EntropyControl:
    """Entropy bonus of the next step; equal on every rank, because its statistics are equal."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Start with the bonus of the first step."""
        self._config = config
        self.bonus = EntropyBonus.first(config)

    def note(self, updates: list[StepStats]) -> None:
        """Adapt the bonus to the token-weighted mean entropy of a step's updates.

        Non-finite entropies, which a skipped update may have, are ignored.
        """
        found = [(u.entropy, u.trained_tokens) for u in updates if u.entropy is not None]
        measured = [(entropy, tokens) for entropy, tokens in found if math.isfinite(entropy)]
        tokens = sum(tokens for _, tokens in measured)
        total = sum(entropy * tokens for entropy, tokens in measured)
        self.bonus = self.bonus.after(total / tokens if tokens else None, self._config)

    def added_to(self, state: HostState) -> HostState:
        """Return rank 0's part of a checkpoint, with the bonus added."""
        text = json.dumps(asdict(self.bonus))
        return replace(state, texts={**state.texts, FILE: text})

    def restore(self, directory: Path) -> None:
        """Read the bonus of a checkpoint; a checkpoint without a target resets the bonus to the first step's.

        Raises:
            SettingsError: the file is damaged.
        """
        path = directory / FILE
        if not path.is_file():
            self.bonus = EntropyBonus.first(self._config)
            return
        try:
            self.bonus = EntropyBonus(**json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"checkpoint {directory}: {FILE} is damaged: {error}") from error
