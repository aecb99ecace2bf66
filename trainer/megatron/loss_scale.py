"""Chooses the factor of the loss under which float16 gradients neither overflow nor vanish.

Micikevicius et al. 2018 (arXiv 1710.03740), with one difference: the step that overflows is not left out but
made again under half the factor, so that every version has trained its batch. The factor is a power of two,
so that multiplying by it and dividing by it again changes no bit of what float16 can hold.
"""

import logging
import math
from collections.abc import Callable
from typing import TypeVar

from trainer.config import OptimizerConfig

log = logging.getLogger("tether.trainer")
T = TypeVar("T")
SMALLEST = 1.0
"""Under it the loss would be made smaller, which no gradient of float32 needs."""


class LossScale:
    """The factor that is in force. It is the same on every rank: the norm that it depends on is."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.value = 2.0 ** round(math.log2(config.initial_loss_scale))
        """The factor."""
        self.finite_steps = 0
        """Steps since it changed."""
        self._window = config.loss_scale_window

    def repeated(self, attempt: Callable[[], tuple[T, float]]) -> tuple[T, int]:
        """Make a step, again under half the factor as long as its gradient is not finite.

        If it is not finite under the smallest factor either, the factor is not the cause, and stays as it
        was.

        Args:
            attempt: makes the step from its beginning under the factor in force, or has no effect;
                returns its result and the gradient's norm.

        Returns:
            The last attempt's result, and the number of attempts before it.
        """
        before, repeats = self.value, 0
        while True:
            made, norm = attempt()
            if math.isfinite(norm):
                self._count(repeats)
                return made, repeats
            if self.value <= SMALLEST:
                self.value = before
                return made, repeats
            log.info("loss_scale.overflow scale=%g next=%g", self.value, self.value / 2)
            self.value, repeats = self.value / 2, repeats + 1

    def _count(self, repeats: int) -> None:
        """Double the factor after as many steps as the window has without a change of it."""
        self.finite_steps = 1 if repeats else self.finite_steps + 1
        if self.finite_steps >= self._window:
            self.value, self.finite_steps = self.value * 2, 0
