"""Defines the numbers of a model, and the operations that a step takes."""

from dataclasses import dataclass
from typing import Any

from trainer.megatron.architecture.families import FAMILIES, Family
from trainer.megatron.architecture.rope import Rope


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that define a dense decoder. Sizes are those of the whole model."""

    model_type: str
    name: str
    """Class name of the checkpoint, for manifests."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    norm_eps: float
    max_positions: int
    rope: Rope
    window: int = 0
    """Tokens that each one attends to, itself and those before it; 0: all."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias

    @property
    def qk_norm(self) -> str:
        """`head`, `projection` or empty, see `Family`."""
        return self.family.qk_norm

    def layer_flops(self, tokens: Any, *, frozen: bool = False) -> Any:
        """Return the floating-point operations of all layers, forward and backward, on one sequence.

        Six for each weight and token, four if the weights are `frozen` and take no gradient. Causal
        attention: half of the square, or what a sliding window leaves of it, in two products, forward and
        twice that backward. The output layer is left out, see `head_flops`.

        Args:
            tokens: of the sequence; a number, or an array of them.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)
        passes = 4 if frozen else 6
        least = (tokens + self.window - abs(tokens - self.window)) // 2  # of numbers and arrays alike
        reach = least if self.window else tokens
        return self.layers * (passes * weights * tokens + 6 * queries * reach * (2 * tokens - reach))

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return those of the output layer, which only trained tokens pass through."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained
