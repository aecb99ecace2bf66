"""Defines the numbers of a model, and the operations that a step takes."""

from dataclasses import dataclass
from typing import Any

from trainer.megatron.architecture.experts import NO_EXPERTS, Experts
from trainer.megatron.architecture.families import FAMILIES, Family
from trainer.megatron.architecture.latent import Latent
from trainer.megatron.architecture.rope import Rope


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that define a decoder. Sizes are those of the whole model."""

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
    latent: Latent | None = None
    """Sizes of latent attention; None: it is not latent."""
    experts: Experts = NO_EXPERTS
    """Numbers of the layers that have any instead of an MLP."""

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

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's value; `head_dim` are those of its query and key."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def attention_split(self) -> int:
        """Elements of a layer's attention matrices that tensor ranks split."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        if (low := self.latent) is None:
            return self.hidden * (2 * queries + 2 * self.kv_heads * self.head_dim)
        expanded = low.kv_rank * self.heads * (low.nope + low.value)
        return (low.query_rank or self.hidden) * queries + expanded + values * self.hidden

    @property
    def attention_replicated(self) -> int:
        """Elements of those that every tensor rank has whole."""
        if (low := self.latent) is None:
            return 0
        return self.hidden * (low.query_rank + low.kv_rank + low.rope)

    def layer_flops(self, tokens: Any, *, frozen: bool = False) -> Any:
        """Return the floating-point operations of all layers, forward and backward, on one sequence.

        Six for each weight and token that passes through it, four if the weights are `frozen` and take no
        gradient. Causal attention: half of the square, or what a sliding window leaves of it, in two
        products, forward and twice that backward. The output layer is left out, see `head_flops`.

        Args:
            tokens: of the sequence; a number, or an array of them.
        """
        weights = self.layers * (self.attention_split + self.attention_replicated) + sum(
            self.mlp_weights(layer) for layer in range(self.layers)
        )
        products = self.heads * (self.head_dim + self.value_dim)
        passes = 4 if frozen else 6
        least = (tokens + self.window - abs(tokens - self.window)) // 2  # of numbers and arrays alike
        reach = least if self.window else tokens
        attention = self.layers * 3 * products * reach * (2 * tokens - reach)
        return passes * weights * tokens + attention

    def mlp_weights(self, layer: int) -> int:
        """Return the weights of a layer's MLP that a token passes through, with those of its router."""
        experts = self.experts
        if not experts.is_sparse(layer):
            return 3 * self.hidden * self.intermediate
        wide = experts.per_token * experts.intermediate + experts.shared_intermediate
        return self.hidden * (3 * wide + experts.count)

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return those of the output layer, which only trained tokens pass through."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained
