"""Defines the numbers of a model, and the operations that a step takes."""

from collections import Counter
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
    windows: tuple[int, ...] = ()
    """`window` of each layer, where they differ; then that is 0."""
    local_rope: Rope | None = None
    """Rotary embedding of the layers with a window; None: that of the others."""
    biases: tuple[str, ...] = ()
    """What has biases because config.json says so: `qkv`, `output` of attention, `mlp`."""
    score_scale: float = 0.0
    """Factor of attention's scores; 0: 1 / sqrt(head_dim)."""
    score_softcap: float = 0.0
    """Bound c of attention's scores s, which become c tanh(s / c); 0: none."""
    logit_softcap: float = 0.0
    """Bound of the logits, likewise."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    without_qk_norm: bool = False
    """Whether config.json switches off the norm of queries and keys that the family has."""
    latent: Latent | None = None
    """Sizes of latent attention; None: it is not latent."""
    experts: Experts = NO_EXPERTS
    """Numbers of the layers that have any instead of an MLP."""
    value_head: bool = False
    """Whether it ends with one value for a token, in the place of the output layer: a critic."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias or "qkv" in self.biases

    @property
    def qk_norm(self) -> str:
        """`head`, `projection` or empty, see `Family`."""
        return "" if self.without_qk_norm else self.family.qk_norm

    @property
    def not_generated(self) -> str:
        """What the engine `megatron` lacks for the model; empty: nothing."""
        return "latent attention" if self.latent else "attention sinks" if self.family.sinks else ""

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's value; `head_dim` are those of its query and key."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def positioned_dim(self) -> int:
        """Dimensions of a head that `rope` applies to."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of a layer's attention."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        if (low := self.latent) is None:
            return self.hidden * (2 * queries + 2 * self.kv_heads * self.head_dim)
        expanded = low.kv_rank * self.heads * (low.nope + low.value)
        lowered = self.hidden * (low.query_rank + low.kv_rank + low.rope)
        return lowered + (low.query_rank or self.hidden) * queries + expanded + values * self.hidden

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings, that of layers with a window after the other one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def window_of(self, layer: int) -> int:
        """Return the window of a layer, 0 if it has none."""
        return self.windows[layer] if self.windows else self.window

    def rope_of(self, layer: int) -> int:
        """Return which of `ropes` rotates a layer."""
        return int(self.local_rope is not None and self.window_of(layer) > 0)

    def layer_flops(self, tokens: Any, *, frozen: bool = False) -> Any:
        """Return the floating-point operations of all layers, forward and backward, on one sequence.

        Six for each weight and token that passes through it, four if the weights are `frozen` and take no
        gradient. Causal attention: half of the square, or what a sliding window leaves of it, in two
        products, forward and twice that backward. The output layer is left out, see `head_flops`.

        Args:
            tokens: of the sequence; a number, or an array of them.
        """
        weights = self.layers * self.attention_weights + sum(map(self.mlp_weights, range(self.layers)))
        total = (4 if frozen else 6) * weights * tokens
        products = self.heads * (self.head_dim + self.value_dim)
        for window, layers in Counter(map(self.window_of, range(self.layers))).items():
            least = (tokens + window - abs(tokens - window)) // 2  # of numbers and arrays alike
            reach = least if window else tokens
            total = total + layers * 3 * products * reach * (2 * tokens - reach)
        return total

    def mlp_weights(self, layer: int) -> int:
        """Return the weights of a layer's MLP that a token passes through, with those of its router."""
        experts, projections = self.experts, 3 if self.family.gated else 2
        if not experts.is_sparse(layer):
            return projections * self.hidden * self.intermediate
        wide = experts.per_token * experts.intermediate + experts.shared_intermediate
        return self.hidden * (projections * wide + experts.count)

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return those of the output layer, which only trained tokens pass through."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained
