"""Reads the rotary embedding that a config.json asks for."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.architecture.families import FAMILIES

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
    score_factor: float = 1.0
    """yarn of latent attention: factor of the scores, beside that."""


def rope_of(path: Path, config: dict[str, Any], positions: int) -> Rope:
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
        score_factor=_score_factor(values, factor) if FAMILIES[config["model_type"]].latent else 1.0,
    )


def _attention_factor(values: dict[str, Any], factor: float) -> float:
    """Return yarn's factor of queries and keys: as given, or from the growth of the context."""
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    ours, whole = values.get("mscale"), values.get("mscale_all_dim")
    return _grown(factor, ours) / _grown(factor, whole) if ours and whole else _grown(factor, 1.0)


def _score_factor(values: dict[str, Any], factor: float) -> float:
    whole = values.get("mscale_all_dim")
    return _grown(factor, whole) ** 2 if whole else 1.0


def _grown(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
