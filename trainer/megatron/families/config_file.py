"""Reads config.json of a Hugging Face checkpoint, and validates the JSON types of the fields in use."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from protocol.errors import SettingsError
from protocol.host.json_file import read_object

KINDS: Mapping[str, tuple[type | UnionType, tuple[str, ...]]] = {
    "a string": (str, ("model_type", "rope_type", "type")),
    "a list": (
        list | tuple,
        ("architectures", "layer_types", "long_factor", "mlp_only_layers", "short_factor"),
    ),
    "an object": (
        Mapping,
        ("full_attention", "rope_parameters", "rope_scaling", "sliding_attention"),
    ),
    "a number": (
        int | float,
        (
            "attention_factor",
            "attn_logit_softcapping",
            "beta_fast",
            "beta_slow",
            "decoder_sparse_step",
            "factor",
            "final_logit_softcapping",
            "first_k_dense_replace",
            "full_attention_interval",
            "head_dim",
            "hidden_size",
            "high_freq_factor",
            "intermediate_size",
            "kv_lora_rank",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "low_freq_factor",
            "max_position_embeddings",
            "max_window_layers",
            "moe_intermediate_size",
            "mscale",
            "mscale_all_dim",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_epsilon",
            "num_attention_heads",
            "num_experts",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_local_experts",
            "original_max_position_embeddings",
            "partial_rotary_factor",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "query_pre_attn_scalar",
            "rms_norm_eps",
            "rope_local_base_freq",
            "rope_theta",
            "routed_scaling_factor",
            "shared_expert_intermediate_size",
            "sliding_window",
            "sliding_window_pattern",
            "swiglu_alpha",
            "swiglu_limit",
            "topk_group",
            "v_head_dim",
            "vocab_size",
        ),
    ),
}
"""JSON type -> its Python types, and the fields of that type in config.json and its rope tables."""
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Required fields of every model."""
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Additional required fields of latent attention."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return config.json of a model.

    Raises:
        SettingsError: the file is missing, or not a JSON object.
    """
    path = model_dir / "config.json"
    return read_object(path, f"cannot read {path}", ": give the directory of a Hugging Face checkpoint")


def check_types(path: Path, table: Mapping[str, Any]) -> None:
    """Validate the types of a table's fields; null counts as absent.

    Args:
        path: path of config.json, for errors.
        table: content of the file, or a rope table in it.

    Raises:
        SettingsError: a field has another type. The message names the field.
    """
    for kind, (types, names) in KINDS.items():
        for name in names:
            if table.get(name) is not None and not isinstance(table[name], types):
                raise SettingsError(f"{path}: {name} = {table[name]!r} must be {kind}")


def check_present(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that config.json has the required fields.

    Raises:
        SettingsError: fields are absent or null. The message names them.
    """
    if missing := [name for name in names if config.get(name) is None]:
        raise SettingsError(f"{path} lacks what a model needs: {', '.join(missing)}")
