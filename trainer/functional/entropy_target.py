"""Adapts the entropy bonus to a target. No torch here."""

from dataclasses import dataclass

from trainer.config import AlgorithmConfig


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
