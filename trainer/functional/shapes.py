"""Defines the array types of this package.

k tokens, n samples of a micro-batch, N of the whole batch, L tokens of the longest sequence, V entries of the
vocabulary.
"""

from jaxtyping import Float, Int
from torch import Tensor

LogitsKV = Float[Tensor, "k V"]
FloatK = Float[Tensor, "k"]
IntK = Int[Tensor, "k"]
LogitsNLV = Float[Tensor, "n L V"]
FloatNL = Float[Tensor, "n L"]
IntNL = Int[Tensor, "n L"]
FloatN = Float[Tensor, "N"]
IntN = Int[Tensor, "N"]
