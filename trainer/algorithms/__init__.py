"""Holds the algorithms, one a file; `make_algorithm` finds them by name."""

from trainer.algorithms.base import Algorithm, TokenLoss
from trainer.algorithms.registry import make_algorithm
from trainer.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig", "TokenLoss", "make_algorithm"]
