"""Defines the array types of this package.

k: tokens, N: samples of the whole batch, V: entries of the vocabulary.
"""

from jaxtyping import Float, Int
from torch import Tensor

LogitsKV = Float[Tensor, "k V"]
FloatK = Float[Tensor, "k"]
IntK = Int[Tensor, "k"]
FloatN = Float[Tensor, "N"]
IntN = Int[Tensor, "N"]
