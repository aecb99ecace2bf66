"""Reads a model's architecture from the config.json of a Hugging Face checkpoint."""

import json
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.architecture.experts import NO_EXPERTS, experts_of
from trainer.megatron.architecture.families import FAMILIES, SUPPORTED
from trainer.megatron.architecture.latent import latent_of
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.architecture.rope import rope_of


def read_architecture(model_dir: Path) -> Architecture:
    """Read `config.json`.

    Raises:
        SettingsError: there is none, or it asks for what is not supported; names the field.
    """
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(
            f"cannot read {path}: {error}: the model must be a directory with a Hugging Face checkpoint"
        ) from error
    return architecture_of(config, path)


def architecture_of(config: dict[str, Any], path: Path) -> Architecture:
    """Return the architecture that a config.json describes; `path` is that of the file, for errors.

    Raises:
        SettingsError: it asks for what is not supported; names the field.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise SettingsError(
            f"{path}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    _refuse_quantized(path, config)
    _refuse_unsupported(path, config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    latent = latent_of(path, config) if FAMILIES[model_type].latent else None
    positions = int(config.get("max_position_embeddings") or 4096)
    names = FAMILIES[model_type].experts
    return Architecture(
        model_type=model_type,
        name=(config.get("architectures") or [SUPPORTED[model_type]])[0],
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=latent.head_dim if latent else int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config["rms_norm_eps"]),
        max_positions=positions,
        rope=rope_of(path, config, positions),
        window=_window(config, positions),
        latent=latent,
        experts=experts_of(path, config, names) if names else NO_EXPERTS,
    )


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
        raise SettingsError(
            f"{path}: quantization_config is not supported by the megatron backend: the weights are stored "
            f"as {method!r}; use a copy of the checkpoint in bfloat16, which transformers writes after "
            "loading with dequantize=True where it can undo the method"
        )


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    some_layers = not FAMILIES[config["model_type"]].windowed and config.get("use_sliding_window")
    window = config.get("sliding_window") if some_layers else None
    positions = config.get("max_position_embeddings") or 0
    unsupported = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "qkv_bias": config["model_type"] == "qwen2_moe" and not config.get("qkv_bias", True),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_dropout": bool(config.get("attention_dropout")),
        "sliding_window": window is not None and window < positions,
        "resid_pdrop": bool(config.get("resid_pdrop")),
        "embd_pdrop": bool(config.get("embd_pdrop")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for field, present in unsupported.items():
        if present:
            raise SettingsError(
                f"{path}: {field} = {config[field]!r} is not supported by the megatron backend"
            )


def _window(config: dict[str, Any], positions: int) -> int:
    family = FAMILIES[config["model_type"]]
    window = config.get("sliding_window", family.default_window) if family.windowed else None
    return int(window) if window is not None and window < positions else 0
