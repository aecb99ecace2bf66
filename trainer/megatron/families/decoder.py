"""Defines the conversion rules of a decoder, layer by layer, with its family's tensor names."""

import re

from trainer.megatron.convert.rules import (
    Direct,
    FusedQKV,
    GatedMLP,
    Rule,
    Split,
    Stacked,
    Vocabulary,
)
from trainer.megatron.families.delta import delta_rules
from trainer.megatron.families.experts import expert_rules
from trainer.megatron.families.latent import latent_rules
from trainer.megatron.families.numbers import Architecture

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
OUTPUT_BIAS = "lm_head.bias"
VALUE_HEAD = ("score.weight", "score.bias")
"""Tensors of a critic's value head, as in a classifier with one label; zeros if the checkpoint lacks them."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def embedding_rules(architecture: Architecture) -> list[Rule]:
    """Return the rules of the embedding, on the first pipeline stage."""
    shape = (architecture.vocabulary, architecture.hidden)
    return [Vocabulary(parameter="embedding.word_embeddings.weight", name=EMBEDDING, shape=shape)]


def layer_rules(architecture: Architecture, layer: int, local_layer: int) -> list[Rule]:
    """Return the rules of one layer: index `layer` in the model, `local_layer` in its model chunk."""
    mcore_prefix, hf_prefix = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."

    names = architecture.family.norms

    def norm(parameter: str) -> list[Rule]:
        if parameter not in names:
            return []
        return _norm_rules(architecture, mcore_prefix + parameter, hf_prefix + names[parameter])

    if architecture.experts.is_sparse(layer):
        mlp = _sparse_mlp_rules(architecture, mcore_prefix + "mlp.", hf_prefix)
    else:
        mlp = _mlp_rules(architecture, mcore_prefix + "mlp.", hf_prefix + "mlp.", architecture.intermediate)
    return [
        *norm("input_layernorm"),
        *_mixer_rules(architecture, layer, mcore_prefix + "self_attention.", hf_prefix),
        *norm("post_attention_layernorm"),
        *norm("pre_mlp_layernorm"),
        *mlp,
        *norm("post_mlp_layernorm"),
    ]


def _norm_rules(architecture: Architecture, parameter: str, name: str) -> list[Rule]:
    kinds = ("weight", "bias") if architecture.family.norm == "layer" else ("weight",)
    return [
        Direct(parameter=f"{parameter}.{kind}", name=f"{name}.{kind}", shape=(architecture.hidden,))
        for kind in kinds
    ]


def _mixer_rules(architecture: Architecture, layer: int, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    """Return the rules of a layer's token mixer: attention or a gated delta net."""
    if architecture.delta and architecture.is_delta(layer):
        names = architecture.family.delta
        return delta_rules(
            architecture.delta, names, architecture.hidden, mcore_prefix, hf_prefix + "linear_attn."
        )
    return _attention_rules(architecture, mcore_prefix, hf_prefix + "self_attn.")


def _attention_rules(architecture: Architecture, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    hidden, head_dim = architecture.hidden, architecture.head_dim
    if architecture.latent:
        return latent_rules(architecture.latent, hidden, architecture.heads, mcore_prefix, hf_prefix)

    def qkv(kind: str, columns: tuple[int, ...]) -> Rule:
        apart = FusedQKV(
            parameter=f"{mcore_prefix}linear_qkv.{kind}",
            names=(f"{hf_prefix}q_proj.{kind}", f"{hf_prefix}k_proj.{kind}", f"{hf_prefix}v_proj.{kind}"),
            groups=architecture.kv_heads,
            queries=architecture.heads // architecture.kv_heads,
            head_dim=head_dim,
            columns=columns,
            gated=architecture.family.output_gate,
        )
        return _stacked(f"{hf_prefix}qkv_proj.{kind}", apart) if architecture.family.fused_qkv else apart

    rules = [qkv("weight", (hidden,))]
    if architecture.qkv_bias:
        rules.append(qkv("bias", ()))
    for kind, heads in (("q", architecture.heads), ("k", architecture.kv_heads)):
        parameter, name = f"{mcore_prefix}{kind}_layernorm.weight", f"{hf_prefix}{kind}_norm.weight"
        if architecture.qk_norm == "head":
            rules.append(Direct(parameter=parameter, name=name, shape=(head_dim,)))
        elif architecture.qk_norm == "projection":
            size = (heads * head_dim,)
            rules.append(Split(parameter=parameter, name=name, shape=size, unit=head_dim))
    out, out_name = (hidden, architecture.heads * head_dim), hf_prefix + architecture.family.attention_output
    rules.append(
        Split(parameter=mcore_prefix + "linear_proj.weight", name=out_name + ".weight", shape=out, dim=1)
    )
    if architecture.family.sinks:
        sinks = (architecture.heads,)
        rules.append(
            Split(parameter=mcore_prefix + "core_attention.sinks", name=hf_prefix + "sinks", shape=sinks)
        )
    if "output" in architecture.biases:
        rules.append(
            Direct(parameter=mcore_prefix + "linear_proj.bias", name=out_name + ".bias", shape=(hidden,))
        )
    return rules


def _mlp_rules(architecture: Architecture, mcore_prefix: str, hf_prefix: str, wide: int) -> list[Rule]:
    hidden = architecture.hidden
    out = architecture.family.mlp_names[-1]
    biased = "mlp" in architecture.biases
    rules = [_mlp_input_rule(architecture, mcore_prefix + "linear_fc1.weight", hf_prefix, (wide, hidden))]
    if biased:
        rules.append(_mlp_input_rule(architecture, mcore_prefix + "linear_fc1.bias", hf_prefix, (wide,)))
    down = Split(
        parameter=mcore_prefix + "linear_fc2.weight",
        name=f"{hf_prefix}{out}.weight",
        shape=(hidden, wide),
        dim=1,
    )
    rules.append(down)
    if biased:
        rules.append(
            Direct(parameter=mcore_prefix + "linear_fc2.bias", name=f"{hf_prefix}{out}.bias", shape=(hidden,))
        )
    return rules


def _mlp_input_rule(
    architecture: Architecture, parameter: str, hf_prefix: str, shape: tuple[int, ...]
) -> Rule:
    """Return the rule of a weight or bias of the first projections of an MLP."""
    kind = parameter.rpartition(".")[2]
    names = [f"{hf_prefix}{name}.{kind}" for name in architecture.family.mlp_names[:-1]]
    if not architecture.family.gated:
        return Split(parameter=parameter, name=names[0], shape=shape)
    gate, up = names
    rule = GatedMLP(parameter=parameter, names=(gate, up), shape=shape)
    return _stacked(f"{hf_prefix}gate_up_proj.{kind}", rule) if architecture.family.fused_gate_up else rule


def _sparse_mlp_rules(architecture: Architecture, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    """Return the rules of router, experts, and the shared MLP."""
    experts, names = architecture.experts, architecture.family.experts
    if names is None:
        raise ValueError(f"family {architecture.model_type} has no names of experts")
    hf_prefix += f"{names.block}."
    rules = expert_rules(experts, names, architecture.hidden, mcore_prefix, hf_prefix)
    if experts.shared_intermediate:
        rules += _mlp_rules(
            architecture,
            f"{mcore_prefix}shared.",
            f"{hf_prefix}{names.shared}.",
            experts.shared_intermediate,
        )
    if experts.shared_gate:
        gate, shape = f"{hf_prefix}{names.shared_gate}.weight", (1, architecture.hidden)
        rules.append(Direct(parameter=f"{mcore_prefix}shared_gate.weight", name=gate, shape=shape))
    return rules


def _stacked(name: str, rule: Rule) -> Rule:
    return Stacked(parameter=rule.parameter, name=name, rule=rule)


def output_rules(architecture: Architecture, *, with_embedding: bool) -> list[Rule]:
    """Return the rules of final norm and output layer, on the last pipeline stage.

    Args:
        architecture: architecture of the model.
        with_embedding: whether the stage also has the embedding. A tied output layer then has no parameter.
    """
    norm = f"model.{architecture.family.final_norm}"
    rules = _norm_rules(architecture, "decoder.final_layernorm", norm)
    shape = (architecture.vocabulary, architecture.hidden)
    if architecture.value_head:
        sizes = zip(VALUE_HEAD, ((1, architecture.hidden), (1,)), strict=True)
        rules += [
            Direct(parameter=name.replace("score.", "value_head."), name=name, shape=size)
            for name, size in sizes
        ]
    elif not architecture.tied:
        rules.append(Vocabulary(parameter="output_layer.weight", name=OUTPUT, shape=shape))
    elif not with_embedding:
        rules.append(Vocabulary(parameter="output_layer.weight", name=EMBEDDING, shape=shape, owner=False))
    if architecture.output_bias:
        rules.append(Vocabulary(parameter="output_layer.bias", name=OUTPUT_BIAS, shape=shape[:1]))
    return rules


def ignorable(architecture: Architecture, name: str) -> bool:
    """Return whether a checkpoint may contain this tensor although the model does not need it.

    Such tensors are a second copy of a tied output layer, rotary buffers, and multi-token prediction layers.
    """
    if (architecture.tied or architecture.value_head) and name == OUTPUT:
        return True
    if architecture.value_head and name == OUTPUT_BIAS:
        return True
    layer = _LAYER.match(name)
    extra = name.startswith("mtp.") or (layer is not None and int(layer[1]) >= architecture.layers)
    return (architecture.family.extra_layers and extra) or _NOT_WEIGHTS.fullmatch(name) is not None
