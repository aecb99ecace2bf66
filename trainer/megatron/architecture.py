"""Reads a model's architecture from the config.json of a Hugging Face checkpoint.

No torch here: checks before the start of a run read it, too.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one model_type differ from Llama."""

    name: str
    """The architecture that exports name."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    qk_norm: str = ""
    """Norm of queries and keys before rotation: `head`, over each head; `projection`, over all of them."""
    post_norms: bool = False
    """Whether norms follow attention and MLP, instead of preceding them."""
    fused: bool = False
    """Whether the checkpoint holds q, k, v as one tensor, and gate and up as one."""
    windowed: bool = False
    """Whether `sliding_window` holds for all layers, without a switch of its own."""
    default_window: int | None = None
    """The `sliding_window` of transformers where config.json does not name it."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", windowed=True, default_window=4096),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="projection", post_norms=True),
    "phi3": Family("Phi3ForCausalLM", fused=True, windowed=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head"),
}
"""model_type -> family. docs/models.md says how to add one."""
SUPPORTED = {model_type: family.name for model_type, family in FAMILIES.items()}
"""model_type -> the architecture that exports name."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `factor` belongs to all types but default, the fields after it to some."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the stretch of frequencies that are interpolated begins and ends at whole ones."""
    attention_factor: float = 1.0
    """yarn: factor of rotated queries and keys."""


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

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias

    @property
    def qk_norm(self) -> str:
        """`head`, `projection` or empty, see `Family`."""
        return self.family.qk_norm

    def layer_flops(self, tokens: Any, *, frozen: bool = False) -> Any:
        """Return the floating-point operations of all layers, forward and backward, on one sequence.

        Six for each weight and token, four if the weights are `frozen` and take no gradient. Causal
        attention: half of the square, or what a sliding window leaves of it, in two products, forward and
        twice that backward. The output layer is left out, see `head_flops`.

        Args:
            tokens: of the sequence; a number, or an array of them.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)
        passes = 4 if frozen else 6
        least = (tokens + self.window - abs(tokens - self.window)) // 2  # of numbers and arrays alike
        reach = least if self.window else tokens
        return self.layers * (passes * weights * tokens + 6 * queries * reach * (2 * tokens - reach))

    def head_flops(self, trained: int, *, frozen: bool = False) -> int:
        """Return those of the output layer, which only trained tokens pass through."""
        return (4 if frozen else 6) * self.hidden * self.vocabulary * trained


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
    _refuse_unsupported(path, config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    positions = int(config.get("max_position_embeddings") or 4096)
    return Architecture(
        model_type=model_type,
        name=(config.get("architectures") or [SUPPORTED[model_type]])[0],
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config["rms_norm_eps"]),
        max_positions=positions,
        rope=_rope(path, config, positions),
        window=_window(config, positions),
    )


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    some_layers = not FAMILIES[config["model_type"]].windowed and config.get("use_sliding_window")
    window = config.get("sliding_window") if some_layers else None
    positions = config.get("max_position_embeddings") or 0
    unsupported = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "attention_dropout": bool(config.get("attention_dropout")),
        "sliding_window": window is not None and window < positions,
        "resid_pdrop": bool(config.get("resid_pdrop")),
        "embd_pdrop": bool(config.get("embd_pdrop")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": config.get("quantization_config") is not None,
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


def _rope(path: Path, config: dict[str, Any], positions: int) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older checkpoints."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values: dict[str, Any] = config.get(field) or {}
    theta = float(values.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = values.get("rope_type", values.get("type", "default"))
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # by the names that its first checkpoints give it
    if kind not in ROPE_TYPES:
        raise SettingsError(
            f"{path}: {field} of type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise SettingsError(
            f"{path}: {field} with partial_rotary_factor = {values['partial_rotary_factor']!r} is not "
            "supported by the megatron backend"
        )
    if kind == "default":
        return Rope(theta)
    # In the order of transformers: some families have the number beside the table.
    original = config.get("original_max_position_embeddings") or values.get(
        "original_max_position_embeddings", positions
    )
    known = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    numbers = {key: float(values[key]) for key in known if values.get(key)}
    factor = values.get("factor")
    factor = positions / original if factor is None else float(factor)
    return Rope(
        theta,
        kind,
        factor,
        **numbers,
        original_max_position_embeddings=int(original),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_attention_factor(values, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(values: dict[str, Any], factor: float) -> float:
    """Return yarn's factor of queries and keys: as given, or from the growth of the context."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    ours, whole = values.get("mscale"), values.get("mscale_all_dim")
    return grown(ours) / grown(whole) if ours and whole else grown(1.0)
