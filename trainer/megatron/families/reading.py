"""Reads a model's architecture from the config.json of a Hugging Face checkpoint."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.families.config_file import (
    LATENT_SIZES,
    SIZES,
    check_present,
    check_types,
    read_config,
)
from trainer.megatron.families.delta import delta_of
from trainer.megatron.families.experts import NO_EXPERTS, experts_of
from trainer.megatron.families.latent import latent_of
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.rope import ropes_of
from trainer.megatron.families.table import FAMILIES, Family
from trainer.megatron.families.windows import windows_of

ACTIVATIONS = {
    "swiglu": ("silu",),
    "geglu": ("gelu_pytorch_tanh",),
    "gelu": ("gelu_pytorch_tanh", "gelu_new"),
}
"""Kind of MLP -> names of its activation in config.json."""


def read_architecture(model_dir: Path) -> Architecture:
    """Read `config.json`.

    Raises:
        SettingsError: the file is missing, or has an unsupported value. The message names the field.
    """
    return architecture_of(read_config(model_dir), model_dir / "config.json")


def read_critic(model_dir: Path) -> Architecture:
    """Read `config.json` of a critic and add a value head. Raises the errors of `read_architecture`."""
    return as_critic(read_architecture(model_dir))


def as_critic(architecture: Architecture) -> Architecture:
    """Return an architecture with a value head instead of its output layer."""
    return replace(architecture, value_head=True, tied=False)


def architecture_of(config: dict[str, Any], path: Path) -> Architecture:
    """Return the architecture from a config.json. `path` names the file in errors.

    Raises:
        SettingsError: a field is missing, has another type or is not supported; the message names it.
    """
    check_types(path, config)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise SettingsError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    check_present(path, config, (*SIZES, family.eps_field, *(LATENT_SIZES if family.latent else ())))
    biases = _biases(family, config)
    _refuse_unsupported(path, config, family, biases)
    hidden, heads, layers = (
        int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    latent = latent_of(path, config) if family.latent else None
    head_dim = latent.head_dim if latent else int(config.get("head_dim") or hidden // heads)
    positions = int(config.get("max_position_embeddings") or 4096)
    rope, local_rope = ropes_of(path, config, family, positions, head_dim)
    return Architecture(
        model_type=model_type,
        name=(config.get("architectures") or [FAMILIES[model_type].name])[0],
        layers=layers,
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config[family.eps_field]),
        max_positions=positions,
        rope=rope,
        **_windows(windows_of(path, config, family, layers, positions)),
        local_rope=local_rope,
        biases=biases,
        score_scale=float(config.get("query_pre_attn_scalar") or 0) ** -0.5 if _scales(family) else 0.0,
        score_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
        without_qk_norm=bool(family.qk_norm_switch) and not config.get(family.qk_norm_switch),
        latent=latent,
        delta=delta_of(path, config) if family.delta else None,
        experts=experts_of(path, config, family.experts) if family.experts else NO_EXPERTS,
    )


def _windows(windows: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of `Architecture` for these windows: a single number if all layers are equal."""
    alike = len(set(windows)) <= 1
    return {"window": windows[0] if alike and windows else 0, "windows": () if alike else windows}


def _biases(family: Family, config: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for switch, names in family.biases.items() if config.get(switch) for name in names)


def _scales(family: Family) -> bool:
    """Return whether config.json sets the scale of the attention scores in this family."""
    return "query_pre_attn_scalar" in family.defaults


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
        raise SettingsError(
            f"{path}: quantization_config is not supported by the megatron backend: the weights are stored "
            f"as {method!r}; use a copy of the checkpoint in bfloat16, which transformers writes after "
            "loading with dequantize=True where it can undo the method"
        )


def _refuse_unsupported(path: Path, config: dict[str, Any], family: Family, biases: tuple[str, ...]) -> None:
    _refuse_quantized(path, config)
    activations = family.activations or ACTIVATIONS[family.mlp]
    bidirectional = "use_bidirectional_attention"
    unsupported = {
        family.activation_field: config.get(family.activation_field, activations[0]) not in activations,
        # No published model has biases only in the MLP; megatron adds biases to all projections of a layer.
        "mlp_bias": bool(config.get("mlp_bias")) and not {"qkv", "output", "mlp"} <= set(biases),
        bidirectional: bool(config.get(bidirectional)),
        "qk_layernorm": bool(config.get("qk_layernorm")),
    }
    for field in ("attention_bias", "use_bias"):
        unsupported[field] = bool(config.get(field)) and field not in family.biases
    for field in (
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "residual_dropout",
        "embedding_dropout",
    ):
        unsupported[field] = bool(config.get(field)) and field not in family.unused_dropouts
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        unsupported[field] = bool(config.get(field)) and not _scales(family)
    if not family.partial_rotation:
        unsupported["partial_rotary_factor"] = config.get("partial_rotary_factor", 1.0) != 1.0
    for field, present in unsupported.items():
        if present:
            raise SettingsError(
                f"{path}: {field} = {config[field]!r} is not supported by the megatron backend"
            )
