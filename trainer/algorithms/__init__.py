"""Recipes, one a file. `make_algorithm` finds them by name."""

from trainer.algorithms.base import Algorithm, AlgorithmConfig, TokenLoss
from trainer.algorithms.registry import make_algorithm

__all__ = ["Algorithm", "AlgorithmConfig", "TokenLoss", "make_algorithm"]
