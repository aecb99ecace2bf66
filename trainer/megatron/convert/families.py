"""Defines the rules of the supported model families, for loading, exporting and publishing alike."""

import re

from trainer.megatron.architecture import Architecture
from trainer.megatron.convert.rules import Direct, FusedQKV, GatedMLP, Rule, Split, Vocabulary

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_NOT_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def embedding_rules(architecture: Architecture) -> list[Rule]:
    """Return the rules of what the first pipeline stage holds beside its layers."""
    shape = (architecture.vocabulary, architecture.hidden)
    return [Vocabulary(parameter="embedding.word_embeddings.weight", name=EMBEDDING, shape=shape)]


def layer_rules(architecture: Architecture, layer: int, local_layer: int) -> list[Rule]:
    """Return the rules of layer `layer` of the model, which is number `local_layer` of its stage."""
    here, there = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."
    attention = there + "self_attn."
    hidden, head_dim = architecture.hidden, architecture.head_dim

    def qkv(kind: str, columns: tuple[int, ...]) -> Rule:
        return FusedQKV(
            parameter=f"{here}self_attention.linear_qkv.{kind}",
            names=(f"{attention}q_proj.{kind}", f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}"),
            groups=architecture.kv_heads,
            queries=architecture.heads // architecture.kv_heads,
            head_dim=head_dim,
            columns=columns,
        )

    def norm(parameter: str, name: str, size: int) -> Rule:
        return Direct(parameter=here + parameter, name=there + name, shape=(size,))

    rules = [norm("input_layernorm.weight", "input_layernorm.weight", hidden), qkv("weight", (hidden,))]
    if architecture.qkv_bias:
        rules.append(qkv("bias", ()))
    if architecture.qk_norm:
        rules.append(norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", head_dim))
        rules.append(norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", head_dim))
    mlp = there + "mlp."
    wide = (architecture.intermediate, hidden)
    rules += [
        Split(
            parameter=here + "self_attention.linear_proj.weight",
            name=attention + "o_proj.weight",
            shape=(hidden, architecture.heads * head_dim),
            dim=1,
        ),
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        GatedMLP(
            parameter=here + "mlp.linear_fc1.weight",
            names=(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            shape=wide,
        ),
        Split(
            parameter=here + "mlp.linear_fc2.weight",
            name=mlp + "down_proj.weight",
            shape=(wide[1], wide[0]),
            dim=1,
        ),
    ]
    return rules


def output_rules(architecture: Architecture, *, with_embedding: bool) -> list[Rule]:
    """Return the rules of what the last stage holds beside its layers.

    Args:
        architecture: the model's.
        with_embedding: whether the embedding is on this stage too, so that a tied output layer has no
            parameter of its own.
    """
    rules: list[Rule] = [
        Direct(
            parameter="decoder.final_layernorm.weight", name="model.norm.weight", shape=(architecture.hidden,)
        )
    ]
    shape = (architecture.vocabulary, architecture.hidden)
    if not architecture.tied:
        rules.append(Vocabulary(parameter="output_layer.weight", name=OUTPUT, shape=shape))
    elif not with_embedding:
        rules.append(Vocabulary(parameter="output_layer.weight", name=EMBEDDING, shape=shape, owner=False))
    return rules


def ignorable(architecture: Architecture, name: str) -> bool:
    """Return whether a checkpoint may hold a name that the model does not need.

    Such are a tied output layer that is saved twice, and rotary buffers.
    """
    return (architecture.tied and name == OUTPUT) or _NOT_WEIGHTS.fullmatch(name) is not None
