"""Collects evidence against a hypothesis, step by step, with a bounded rate of false alarms.

An e-process starts at 1, and its expectation never grows while the hypothesis is true, at any stopping time.
By Ville's inequality it exceeds 1 / a at any step of a run with probability at most a. Here the e-process is
a mixture of likelihood ratios over alternatives and over the step at which the fault began (Ramdas et al.
2023, arXiv 2210.01948, section 3). So a long clean past does not hide a fault, and the start with the largest
share dates the fault.

Shapes: G alternatives, K starts.
"""

import math

import numpy as np
from numpy.typing import NDArray

MAX_STARTS = 64
"""Maximum number of starts; dropping one only reduces the evidence."""
ALTERNATIVES = np.array([0.01, 0.03, 0.1, 0.3, 0.7, 0.97])
"""Alternative rates of an event, against a smaller rate under the hypothesis, [G]."""


class Evidence:
    """Evidence against one hypothesis."""

    def __init__(self, alternatives: int) -> None:
        """Start at 1; `alternatives` is G."""
        self._starts = np.empty(0, dtype=np.int64)
        self._log = np.empty((0, alternatives))
        """Log of weight times likelihood ratio, [K, G]."""
        self._start_count = 0

    def add(self, step: int, log_ratios: NDArray[np.float64]) -> None:
        """Add the evidence of a step; steps must be in ascending order.

        Args:
            step: number of the step.
            log_ratios: [G], log of P(seen | alternative) / P(seen | hypothesis), or with an upper bound of
                the denominator.
        """
        if not len(self._starts) or self._starts[-1] != step:
            self._start_count += 1
            # The weights of all starts sum to 1, so the mixture stays an e-process.
            weight = -math.log(self._start_count * (self._start_count + 1)) - math.log(self._log.shape[1])
            self._starts = np.append(self._starts, step)
            self._log = np.vstack([self._log, np.full((1, self._log.shape[1]), weight)])
        self._log += log_ratios
        if len(self._starts) > MAX_STARTS:
            kept = np.arange(len(self._starts)) != self._log[:-1].max(1).argmin()
            self._starts, self._log = self._starts[kept], self._log[kept]

    @property
    def log(self) -> float:
        """Natural logarithm of the evidence."""
        if not len(self._starts):
            return 0.0
        largest = float(self._log.max())
        return largest + math.log(float(np.exp(self._log - largest).sum()))

    @property
    def since(self) -> int:
        """Step since which the evidence is strongest; -1 without evidence."""
        return int(self._starts[self._log.max(1).argmax()]) if len(self._starts) else -1


def rate_ratios(hits: int, trials: int, rate: float) -> NDArray[np.float64]:
    """Return the log-ratios of `hits` events in `trials`, against a rate of at most `rate`, [G].

    For alternatives above `rate` the ratio's expectation is at most 1 under every smaller rate, too.
    """
    above = np.maximum(ALTERNATIVES, 2 * rate)
    missed = trials - hits
    ratios: NDArray[np.float64] = hits * np.log(above / rate) + missed * np.log((1 - above) / (1 - rate))
    return ratios


class FalseAlarms:
    """Allocation of a run's allowed false-alarm probability to any number of hypotheses."""

    def __init__(self, rate: float) -> None:
        """Allow a total probability of `rate`."""
        self._rate, self._limits = rate, dict[str, float]()

    def limit(self, hypothesis: str) -> float:
        """Return the log of the evidence at which a hypothesis is refuted."""
        if hypothesis not in self._limits:
            number = len(self._limits) + 1
            self._limits[hypothesis] = math.log(number * (number + 1) / self._rate)
        return self._limits[hypothesis]
