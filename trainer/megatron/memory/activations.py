"""Lists the activations that a model's layers store for the backward pass, per token. Does not import torch.

Latent attention stores keys both at low rank and for all heads, and values both at their own size and padded
to the size of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trainer.config import TrainerConfig
from trainer.layers.attention.terms import TORCH_FLASH_IMPLS
from trainer.layers.limits import NO_COPIES, KeyCopies
from trainer.megatron.families.delta import DeltaNet
from trainer.megatron.families.numbers import Architecture

CHUNK = 64
"""Chunk size of the delta rule, tokens."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Tensor of the forward pass that each layer stores for the backward pass."""

    name: str
    elements: Callable[[Architecture], int]
    """Number of elements per token, over all tensor ranks."""
    module: str = ""
    """Entry of `recompute_modules` that avoids storing the tensor; empty: always stored."""
    split: str = "tensor"
    """tensor: split over the tensor ranks; sequence: split only with sequence parallelism; rows: as
    `sequence`, but each rank that shares an expert stores all of its rows."""
    item_bytes: int = 0
    """Bytes per element; 0: as `trainer.dtype`."""


COMMON = (
    Activation("input of the attention's norm, the residual stream", lambda a: a.hidden, split="sequence"),
    Activation("input of the projection to q, k, v", lambda a: a.hidden, "layernorm", "sequence"),
    Activation("input of the MLP's norm, the residual stream", lambda a: _own_input(a), split="sequence"),
    Activation("input of the MLP", lambda a: _own_input(a), "layernorm", "sequence"),
    Activation("inputs of the norms after", lambda a: _both_norms(a) * 2 * a.hidden, split="sequence"),
    Activation(
        "inputs of the norms before, in float32",
        lambda a: _in_float32(a) * a.family.pre_norms * 2 * a.hidden,
        "layernorm",
        "sequence",
        4,
    ),
    Activation(
        "inputs of the norms after, in float32",
        lambda a: _in_float32(a) * a.family.post_norms * 2 * a.hidden,
        split="sequence",
        item_bytes=4,
    ),
)
"""Activations of every layer. Norms after attention and MLP instead of before need the same memory: inputs of
the norms instead of outputs."""
ATTENTION = (
    Activation("what makes q, k, v, before and after its norms", lambda a: _low_ranks(a), split="sequence"),
    Activation("q, k, v together, of which v stays a view", lambda a: _projected(a)),
    Activation("q of its own, as a norm's input", lambda a: bool(a.qk_norm) * a.heads * a.head_dim),
    Activation("k of its own, likewise", lambda a: _over_heads(a) * a.kv_heads * a.head_dim),
    Activation(
        "q and k normed, before the norm's weight",
        lambda a: _over_heads(a) * (a.heads + a.kv_heads) * a.head_dim,
        item_bytes=4,
    ),
    Activation("q with rotation", lambda a: a.heads * a.head_dim),
    Activation("k with rotation", lambda a: a.kv_heads * a.head_dim),
    Activation("v as wide as k, and attention's output", lambda a: _widened(a)),
    Activation("log-sum-exp of the scores", lambda a: a.heads, "core_attn", item_bytes=4),
    Activation("attention's output, input of its projection", lambda a: a.heads * a.value_dim),
    Activation(
        "output before its gate, gate and its sigmoid",
        lambda a: a.family.output_gate * 3 * a.heads * a.head_dim,
        item_bytes=4,
    ),
    Activation(
        "q and k in float32, as inputs of a norm",
        lambda a: _in_float32(a) * bool(a.qk_norm) * (a.heads + a.kv_heads) * a.head_dim,
        item_bytes=4,
    ),
)
"""Activations of attention."""
DELTA = (
    Activation("outputs of the input projection", lambda a: _delta(a).key_heads * sum(_delta(a).sizes)),
    Activation("strengths and decays on the way", lambda a: 6 * _delta(a).value_heads, item_bytes=4),
    Activation("output, normed, gate and both products", lambda a: 5 * _delta_values(a), item_bytes=4),
    Activation("input of the output projection", lambda a: _delta_values(a)),
)
"""Activations of a gated delta net, whose convolution and delta rule are recomputed."""
MLP = (
    Activation("gate and up, or what has no gate", lambda a: mlp_projections(a) * a.intermediate, "mlp"),
    Activation("product, input of the projection down", lambda a: a.intermediate, "mlp"),
)
"""Activations of an MLP."""
EXPERTS = (
    Activation("logits and scores of the router", lambda a: 2 * a.experts.count, "mlp", "sequence", 4),
    Activation("rows of experts", lambda a: a.experts.per_token * a.hidden, "mlp", "rows"),
    Activation("gate and up", lambda a: 2 * a.experts.per_token * a.experts.intermediate, "mlp", "sequence"),
    Activation("product", lambda a: a.experts.per_token * a.experts.intermediate, "mlp", "sequence"),
    Activation("outputs of experts", lambda a: a.experts.per_token * a.hidden, "mlp", "sequence"),
    Activation("activations of the MLP for all tokens", lambda a: 3 * a.experts.shared_intermediate, "mlp"),
)
"""Activations of experts, if rows are spread evenly over the ranks."""


def activations_of(*, sparse: bool = False, delta: bool = False) -> tuple[Activation, ...]:
    """Return a layer's stored activations: with experts if `sparse`, a gated delta net if `delta`."""
    return *COMMON, *(DELTA if delta else ATTENTION), *(EXPERTS if sparse else MLP)


def delta_rule_elements(a: Architecture) -> int:
    """Return the float32 elements per token in the convolution and the delta rule, over all tensor ranks.

    Measured for transformers' own functions on a CPU; library kernels need less. Each chunk of 64 tokens
    stores its products and a state.
    """
    if (delta := a.delta) is None:
        return 0
    keys, states = delta.value_heads * delta.key, delta.value_heads * delta.key * delta.value // CHUNK
    mixed = delta.key_heads * sum(delta.sizes[:3])
    return 12 * keys + 3 * _delta_values(a) + 6 * mixed + 5 * CHUNK * delta.value_heads + 4 * states


def key_copies(a: Architecture, trainer: TrainerConfig) -> KeyCopies:
    """Return the memory of copied shared keys, in tokens of a micro-batch.

    torch's kernel copies keys in layers with a window, and again in the backward pass of a layer, with
    gradients for every head. The few copies in other layers fit into the memory of the MLP's gradients. Other
    kernels store their copies.
    """
    without = trainer.recompute_modules if trainer.recompute_granularity == "selective" else ()
    kept = sum(
        row.elements(a) * (row.item_bytes or 2) for row in activations_of() if row.module not in without
    )
    heads, sizes = a.heads if a.latent else a.kv_heads, 2 * (a.head_dim + a.value_dim)
    if trainer.attention_backend not in ("auto", "torch", *TORCH_FLASH_IMPLS) or a.score_softcap:
        return KeyCopies(heads * sizes / kept)
    window = max(map(a.window_of, range(a.layers)))
    return KeyCopies((2 * heads + a.heads) * sizes / (kept * a.layers), window) if window else NO_COPIES


def _delta(a: Architecture) -> DeltaNet:
    if a.delta is None:
        raise ValueError(f"no layer of {a.model_type} has a gated delta net")
    return a.delta


def _delta_values(a: Architecture) -> int:
    return _delta(a).value_heads * _delta(a).value


def _heads(a: Architecture) -> int:
    return (1 + a.family.output_gate) * a.heads + 2 * a.kv_heads


def _projected(a: Architecture) -> int:
    """Return the number of elements of the projections' outputs that are stored unchanged."""
    return a.heads * (a.latent.nope + a.latent.value) if a.latent else _heads(a) * a.head_dim


def _low_ranks(a: Architecture) -> int:
    return 2 * (a.latent.query_rank + a.latent.kv_rank) + a.latent.rope if a.latent else 0


def _widened(a: Architecture) -> int:
    return 2 * a.heads * a.head_dim if a.latent else 0


def mlp_projections(a: Architecture) -> int:
    """Return the number of input projections of an MLP."""
    return 2 if a.family.gated else 1


def _own_input(a: Architecture) -> int:
    """Return the elements of the MLP's input, 0 if attention has the same input."""
    return 0 if a.family.parallel_mlp else a.hidden


def _both_norms(a: Architecture) -> bool:
    return a.family.pre_norms and a.family.post_norms


def _in_float32(a: Architecture) -> bool:
    """Return whether norms use float32 copies of their inputs."""
    return a.family.norm == "rms_from_one"


def _over_heads(a: Architecture) -> bool:
    return a.qk_norm == "projection"
