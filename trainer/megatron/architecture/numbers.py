"""Defines the numbers of a model, and the operations that a step takes."""

from collections import Counter
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

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias or "qkv" in self.biases

    @property
    def qk_norm(self) -> str:
        """`head`, `projection` or empty, see `Family`."""
        return self.family.qk_norm

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

        Six for each weight and token, four if the weights are `frozen` and take no gradient. Causal
        attention: half of the square, or what a sliding window leaves of it, in two products, forward and
        twice that backward. The output layer is left out, see `head_flops`.

        Args:
            tokens: of the sequence; a number, or an array of them.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 3 if self.family.gated else 2
        weights = self.hidden * (2 * queries + 2 * keys + projections * self.intermediate)
        total = (4 if frozen else 6) * self.layers * weights * tokens
        for window, layers in Counter(map(self.window_of, range(self.layers))).items():
            least = (tokens + window - abs(tokens - window)) // 2  # of numbers and arrays alike
            reach = least if window else tokens
            total = total + layers * 6 * queries * reach * (2 * tokens - reach)
        return total

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return those of the output layer, which only trained tokens pass through."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained
