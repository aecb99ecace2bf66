"""Defines the rules of the supported model families, for loading, exporting and publishing alike."""

import re

from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.convert.experts import router_rules, stacked_rules
from trainer.megatron.convert.latent import latent_rules
from trainer.megatron.convert.rules import (
    Direct,
    ExpertStack,
    FusedQKV,
    GatedMLP,
    Rule,
    Split,
    Stacked,
    Vocabulary,
)

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def embedding_rules(architecture: Architecture) -> list[Rule]:
    """Return the rules of what the first pipeline stage holds beside its layers."""
    shape = (architecture.vocabulary, architecture.hidden)
    return [Vocabulary(parameter="embedding.word_embeddings.weight", name=EMBEDDING, shape=shape)]


def layer_rules(architecture: Architecture, layer: int, local_layer: int) -> list[Rule]:
    """Return the rules of layer `layer` of the model, which is number `local_layer` of its stage."""
    here, there = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."

    def norm(parameter: str, name: str) -> Rule:
        return Direct(
            parameter=f"{here}{parameter}.weight", name=f"{there}{name}.weight", shape=(architecture.hidden,)
        )

    attention = _attention_rules(architecture, here + "self_attention.", there + "self_attn.")
    if architecture.experts.is_sparse(layer):
        mlp = _expert_rules(architecture, here + "mlp.", there)
    else:
        mlp = _mlp_rules(architecture, here + "mlp.", there + "mlp.", architecture.intermediate)
    if architecture.family.post_norms:
        after_attention = norm("post_attention_layernorm", "post_attention_layernorm")
        return [*attention, after_attention, *mlp, norm("post_mlp_layernorm", "post_feedforward_layernorm")]
    before_mlp = norm("pre_mlp_layernorm", "post_attention_layernorm")
    return [norm("input_layernorm", "input_layernorm"), *attention, before_mlp, *mlp]


def _attention_rules(architecture: Architecture, here: str, there: str) -> list[Rule]:
    hidden, head_dim = architecture.hidden, architecture.head_dim
    if architecture.latent:
        return latent_rules(architecture.latent, hidden, architecture.heads, here, there)

    def qkv(kind: str, columns: tuple[int, ...]) -> Rule:
        apart = FusedQKV(
            parameter=f"{here}linear_qkv.{kind}",
            names=(f"{there}q_proj.{kind}", f"{there}k_proj.{kind}", f"{there}v_proj.{kind}"),
            groups=architecture.kv_heads,
            queries=architecture.heads // architecture.kv_heads,
            head_dim=head_dim,
            columns=columns,
        )
        return _stacked(f"{there}qkv_proj.{kind}", apart) if architecture.family.fused else apart

    rules = [qkv("weight", (hidden,))]
    if architecture.qkv_bias:
        rules.append(qkv("bias", ()))
    for kind, heads in (("q", architecture.heads), ("k", architecture.kv_heads)):
        parameter, name = f"{here}{kind}_layernorm.weight", f"{there}{kind}_norm.weight"
        if architecture.qk_norm == "head":
            rules.append(Direct(parameter=parameter, name=name, shape=(head_dim,)))
        elif architecture.qk_norm == "projection":
            size = (heads * head_dim,)
            rules.append(Split(parameter=parameter, name=name, shape=size, unit=head_dim))
    out = (hidden, architecture.heads * head_dim)
    rules.append(Split(parameter=here + "linear_proj.weight", name=there + "o_proj.weight", shape=out, dim=1))
    return rules


def _mlp_rules(architecture: Architecture, here: str, there: str, wide: int) -> list[Rule]:
    hidden = architecture.hidden
    gate_up: Rule = GatedMLP(
        parameter=here + "linear_fc1.weight",
        names=(there + "gate_proj.weight", there + "up_proj.weight"),
        shape=(wide, hidden),
    )
    if architecture.family.fused:
        gate_up = _stacked(there + "gate_up_proj.weight", gate_up)
    down = Split(
        parameter=here + "linear_fc2.weight", name=there + "down_proj.weight", shape=(hidden, wide), dim=1
    )
    return [gate_up, down]


def _expert_rules(architecture: Architecture, here: str, there: str) -> list[Rule]:
    """Return the rules of router, experts, and the MLP that all tokens pass through."""
    hidden, wide, names = architecture.hidden, architecture.experts.intermediate, architecture.family.experts
    if names is None:
        raise ValueError(f"family {architecture.model_type} has no names of experts")
    there += f"{names.block}."
    rules = router_rules(architecture.experts, hidden, f"{here}router.", f"{there}{names.router}.")
    if names.stacked:
        return rules + stacked_rules(architecture.experts, hidden, f"{here}experts.", f"{there}experts.")
    experts = [f"{there}experts.{number}" for number in range(architecture.experts.count)]
    fc1, fc2 = f"{here}experts.fc1", f"{here}experts.fc2"
    rules += [
        ExpertStack(
            parameter=fc1,
            rules=tuple(
                GatedMLP(
                    parameter=fc1,
                    names=(f"{expert}.{names.gate}.weight", f"{expert}.{names.up}.weight"),
                    shape=(wide, hidden),
                )
                for expert in experts
            ),
        ),
        ExpertStack(
            parameter=fc2,
            dim=1,
            rules=tuple(
                Split(parameter=fc2, name=f"{expert}.{names.down}.weight", shape=(hidden, wide), dim=1)
                for expert in experts
            ),
        ),
    ]
    if architecture.experts.shared_intermediate:
        shared = architecture.experts.shared_intermediate
        rules += _mlp_rules(architecture, f"{here}shared.", f"{there}{names.shared}.", shared)
    if architecture.experts.shared_gate:
        gate = f"{there}{names.shared_gate}.weight"
        rules.append(Direct(parameter=f"{here}shared_gate.weight", name=gate, shape=(1, hidden)))
    return rules


def _stacked(name: str, rule: Rule) -> Rule:
    return Stacked(parameter=rule.parameter, name=name, rule=rule)


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

    Such are a tied output layer that is saved twice, rotary buffers, and layers that predict further tokens.
    """
    if architecture.tied and name == OUTPUT:
        return True
    layer = _LAYER.match(name)
    extra = layer is not None and int(layer[1]) >= architecture.layers
    return (architecture.family.extra_layers and extra) or _NOT_WEIGHTS.fullmatch(name) is not None
