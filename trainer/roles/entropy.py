"""Adapts the entropy bonus of a run to a target, from step to step and in checkpoints."""

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
    """The bonus that follows what was measured so far."""

    coef: float
    """c, the coefficient where the entropy is below the target."""
    active: bool = True
    """Whether it was, in the step before."""

    @classmethod
    def first(cls, config: AlgorithmConfig) -> "EntropyBonus":
        """Return the bonus of the first step."""
        return cls(config.entropy_coef)

    @property
    def in_force(self) -> float:
        """The coefficient of the next step."""
        return self.coef if self.active else 0.0

    def after(self, entropy: float | None, config: AlgorithmConfig) -> "EntropyBonus":
        """Return the bonus after a step.

            c' = clip(c + delta, 0, max) if e < target else clip(c - delta, 0, max)
            the bonus is c' if e <= target, else 0

        Skywork-OR1: He et al. 2025 (arXiv 2505.22312), adaptive entropy control. There e is measured by a
        pass before the step; here it is the previous step's entropy, which needs no extra pass.

        Args:
            entropy: mean over the trained tokens of the step, nats; None (the bonus stays) if there was none.
            config: target, delta and max.
        """
        if entropy is None:
            return self
        delta = config.entropy_coef_delta if entropy < config.entropy_target else -config.entropy_coef_delta
        coef = min(max(self.coef + delta, 0.0), config.entropy_coef_max)
        return EntropyBonus(coef, entropy <= config.entropy_target)


FILE = "entropy.json"
"""File of a checkpoint; rank 0 writes it, and every rank reads it."""


class EntropyControl:
    """The bonus of the next step; the same on every rank, as the statistics that it follows are."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Begin with the bonus of the first step."""
        self._config = config
        self.bonus = EntropyBonus.first(config)

    def note(self, updates: list[StepStats]) -> None:
        """Follow the measurements of a step's updates; the mean over their tokens counts.

        An update that was skipped for numbers that are not finite may have measured one.
        """
        found = [(u.entropy, u.trained_tokens) for u in updates if u.entropy is not None]
        measured = [(entropy, tokens) for entropy, tokens in found if math.isfinite(entropy)]
        tokens = sum(tokens for _, tokens in measured)
        total = sum(entropy * tokens for entropy, tokens in measured)
        self.bonus = self.bonus.after(total / tokens if tokens else None, self._config)

    def added_to(self, state: HostState) -> HostState:
        """Return rank 0's part of a checkpoint with the bonus."""
        text = json.dumps(asdict(self.bonus))
        return replace(state, texts={**state.texts, FILE: text})

    def restore(self, directory: Path) -> None:
        """Read the bonus of a checkpoint; one that was made without a target leaves the first step's bonus.

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
