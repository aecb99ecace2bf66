"""Defines the numbers of a model, and the floating-point operations of a step."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from trainer.megatron.families.delta import DeltaNet
from trainer.megatron.families.experts import NO_EXPERTS, Experts
from trainer.megatron.families.latent import Latent
from trainer.megatron.families.rope import Rope
from trainer.megatron.families.table import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Architecture:
    """Numbers that define a decoder. Sizes refer to the whole model, not to one rank."""

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
    """Attention window in tokens, including the token itself; 0: unlimited."""
    windows: tuple[int, ...] = ()
    """`window` of each layer, if layers differ; `window` is then 0."""
    local_rope: Rope | None = None
    """Rotary embedding of layers with a window; None: same as the other layers."""
    biases: tuple[str, ...] = ()
    """Projections with biases according to config.json: `qkv`, `output` of attention, `mlp`."""
    score_scale: float = 0.0
    """Factor of attention scores; 0: 1 / sqrt(head_dim)."""
    score_softcap: float = 0.0
    """Bound c of attention scores s, which become c tanh(s / c); 0: unbounded."""
    logit_softcap: float = 0.0
    """Bound c of the logits, applied in the same way; 0: unbounded."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    without_qk_norm: bool = False
    """Whether config.json disables the family's norm of queries and keys."""
    latent: Latent | None = None
    """Sizes of latent attention; None without latent attention."""
    delta: DeltaNet | None = None
    """Layers with a gated delta net instead of attention, and its sizes; None: all layers have attention."""
    experts: Experts = NO_EXPERTS
    """Numbers of the layers with experts."""
    value_head: bool = False
    """Whether the model is a critic: one value per token replaces the output layer."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias or "qkv" in self.biases

    @property
    def output_bias(self) -> bool:
        """Whether there is an output layer with a bias."""
        return self.family.output_bias and not self.value_head

    @property
    def qk_norm(self) -> str:
        """`head`, `projection` or empty, see `Family`."""
        return "" if self.without_qk_norm else self.family.qk_norm

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's value. Queries and keys have `head_dim`."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def positioned_dim(self) -> int:
        """Dimensions of a head that `rope` applies to."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def attention_weights(self) -> int:
        """Number of elements of the matrices of a layer's attention."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        if (low := self.latent) is None:
            gates = queries if self.family.output_gate else 0
            return self.hidden * (2 * queries + gates + 2 * self.kv_heads * self.head_dim)
        expanded = low.kv_rank * self.heads * (low.nope + low.value)
        lowered = self.hidden * (low.query_rank + low.kv_rank + low.rope)
        return lowered + (low.query_rank or self.hidden) * queries + expanded + values * self.hidden

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embeddings of the model; the second is for layers with a window."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def is_delta(self, layer: int) -> bool:
        """Return whether a layer has a gated delta net."""
        return self.delta is not None and layer in self.delta.layers

    def window_of(self, layer: int) -> int:
        """Return the window of a layer in tokens, 0 if it has none."""
        return self.windows[layer] if self.windows else self.window

    def rope_of(self, layer: int) -> int:
        """Return the index in `ropes` of a layer's rotary embedding."""
        return int(self.local_rope is not None and self.window_of(layer) > 0)

    def layer_flops(self, tokens: Any, *, frozen: bool = False) -> Any:
        """Return the floating-point operations of all layers, forward and backward, on one sequence.

        Weights: six operations per weight and token, four if `frozen`. Causal attention: all visible pairs of
        tokens, two products, once forward and twice backward. `head_flops` counts the output layer.

        Args:
            tokens: length of the sequence, a number or an array of numbers.
            frozen: whether the weights have no gradient.
        """
        attending = [layer for layer in range(self.layers) if not self.is_delta(layer)]
        weights = len(attending) * self.attention_weights + sum(map(self.mlp_weights, range(self.layers)))
        state = 0
        if self.delta:
            weights += len(self.delta.layers) * self.delta.weights(self.hidden)
            state = len(self.delta.layers) * self.delta.state_flops
        total = ((4 if frozen else 6) * weights + state) * tokens
        products = self.heads * (self.head_dim + self.value_dim)
        for window, layers in Counter(map(self.window_of, attending)).items():
            least = (tokens + window - abs(tokens - window)) // 2  # the minimum, for numbers and for arrays
            reach = least if window else tokens
            total = total + layers * 3 * products * reach * (2 * tokens - reach)
        return total

    def mlp_weights(self, layer: int) -> int:
        """Return the number of weights of a layer's MLP that each token uses, including the router."""
        experts, projections = self.experts, 3 if self.family.gated else 2
        if not experts.is_sparse(layer):
            return projections * self.hidden * self.intermediate
        wide = experts.per_token * experts.intermediate + experts.shared_intermediate
        return self.hidden * (projections * wide + experts.count)

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return the floating-point operations of the output layer, which only processes trained tokens."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained
