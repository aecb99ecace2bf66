"""Selects the modules of each layer of a model, by the layer's index in the whole model."""

import math
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layers.attention.latent import LatentAttention
from trainer.megatron.layers.delta import DeltaNetLayer
from trainer.megatron.layers.dense import MLPS, NORMS, BiasedRow, ProjectionNorm
from trainer.megatron.layers.experts.layer import ExpertLayer
from trainer.megatron.layers.layer import Layer, ParallelLayer, PostNormLayer, residual


def layer_spec(
    architecture: Architecture, layer: int, attention: type[Any] | None, core_attention: type[Any]
) -> ModuleSpec:
    """Return the modules of a layer.

    Args:
        architecture: architecture of the whole model.
        layer: index of the layer in the whole model, from 0.
        attention: class of self-attention; None for training.
        core_attention: class of the core attention, which takes `terms`.
    """
    family, experts = architecture.family, architecture.experts
    norm = NORMS[family.norm]
    kind: dict[str, Any] = {"module": Layer}
    if experts.is_sparse(layer):
        kind = {"module": ExpertLayer, "params": {"experts": experts, "layer": layer}}
    elif family.post_norms:
        kind = {"module": PostNormLayer, "params": {"norm": norm}}
    elif family.parallel_mlp:
        kind = {"module": ParallelLayer}
    return ModuleSpec(
        **kind,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if family.pre_norms else IdentityOp,
            self_attention=_attention(architecture, layer, attention, core_attention),
            self_attn_bda=residual,
            pre_mlp_layernorm=norm if "pre_mlp_layernorm" in family.norms else IdentityOp,
            mlp=_mlp(architecture, layer),
            mlp_bda=residual,
        ),
    )


def attention_terms(architecture: Architecture, layer: int) -> AttentionTerms:
    """Return the terms of a layer's attention."""
    number = architecture.rope_of(layer)
    rope, head_dim = architecture.ropes[number], architecture.head_dim
    # If all dimensions are rotated, a factor of rotated queries and keys is squared in their products.
    is_whole = rope.dimensions(architecture.positioned_dim) == head_dim
    factor = rope.score_factor * (rope.attention_factor**2 if is_whole else 1.0)
    scale = None
    if factor != 1.0 or architecture.score_scale:
        scale = factor * (architecture.score_scale or 1 / math.sqrt(head_dim))
    return AttentionTerms(
        scale, architecture.window_of(layer), architecture.score_softcap, number, architecture.family.sinks
    )


def _attention(architecture: Architecture, layer: int, attention: Any, core_attention: Any) -> ModuleSpec:
    if architecture.is_delta(layer):
        return ModuleSpec(module=DeltaNetLayer, params={"delta": architecture.delta})
    terms = attention_terms(architecture, layer)
    if architecture.latent:
        params = {
            "latent": architecture.latent,
            "terms": terms,
            "rotary_factor": architecture.rope.attention_factor,
        }
        return ModuleSpec(module=attention or LatentAttention, params=params)
    projections = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(module=core_attention, params={"terms": terms}),
        linear_proj=BiasedRow if "output" in architecture.biases else RowParallelLinear,
        q_layernorm=_head_norm(architecture, architecture.heads),
        k_layernorm=_head_norm(architecture, architecture.kv_heads),
    )
    return ModuleSpec(
        module=attention or SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=projections,
    )


def _mlp(architecture: Architecture, layer: int) -> Any:
    return IdentityOp if architecture.experts.is_sparse(layer) else MLPS[architecture.family.mlp]


def _head_norm(architecture: Architecture, heads: int) -> Any:
    if architecture.qk_norm == "projection":
        return ModuleSpec(module=ProjectionNorm, params={"heads": heads})
    return NORMS[architecture.family.norm] if architecture.qk_norm == "head" else IdentityOp
