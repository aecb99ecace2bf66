"""Names the tensors of an EAGLE draft head, which is trained and published with its target model.

An EAGLE head (Li et al. 2024, arXiv 2401.15077) concatenates the target's last hidden state with the
embedding of the next token. One Llama layer predicts the next hidden state from the result. Embeddings and
output layer are the target's.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

PREFIX = "draft_head."
"""Prefix of the head's tensors in a version; the rest of the name is the name in the head's files."""


def head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a head's files, given its config.json."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    wide, narrow = size * heads, size * int(config.get("num_key_value_heads") or heads)
    shapes = {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    layer = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
    return {"fc.weight": (hidden, 2 * hidden), **layer}


def has_head(names: Iterable[str]) -> bool:
    """Return whether a version with these tensor names contains a head."""
    return any(name.startswith(PREFIX) for name in names)


def without_head(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a version without the head's tensors."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
