"""Holds the algorithms, one per file. `make_algorithm` finds an algorithm by name."""

from trainer.algorithms.base import Algorithm, TokenLoss
from trainer.algorithms.registry import make_algorithm
from trainer.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig", "TokenLoss", "make_algorithm"]
