"""Reads the rotary embedding from a config.json."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.families.config_file import check_types
from trainer.megatron.families.table import Family

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
GEMMA_THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Kind of layer -> (field of theta in older checkpoints, default)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. All types except `default` use `factor`; some types use the fields after it."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the interpolated frequencies are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """yarn and longrope: factor of rotated queries and keys."""
    score_factor: float = 1.0
    """yarn with latent attention: additional factor of the scores."""
    partial_rotary_factor: float = 1.0
    """Share of each head's dimensions that is rotated, starting with the first."""
    interleaved: bool = False
    """Whether dimension 2 i is paired with 2 i + 1; otherwise the first half is paired with the second."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in sequences of at most the original context."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequencies in longer sequences."""

    def dimensions(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_rotary_factor)


def ropes_of(
    path: Path, config: dict[str, Any], family: Family, positions: int, head_dim: int
) -> tuple[Rope, Rope | None]:
    """Read the rotary embedding, and the second embedding of layers with a window, if any.

    Args:
        path: path of config.json, for errors.
        config: content of the file.
        family: the model's family.
        positions: longest sequence of the model, in tokens.
        head_dim: dimensions of a head.

    Raises:
        SettingsError: an embedding is not supported. The message names the field.
    """
    if not family.local_rope:
        return _rope_of(path, config, family, positions, head_dim), None
    named = config.get("rope_parameters") or {}
    check_types(path, named)
    if unknown := sorted(set(named) - set(GEMMA_THETAS)):
        raise SettingsError(
            f"{path}: rope_parameters must name {' and '.join(GEMMA_THETAS)}, not {', '.join(unknown)}"
        )
    scaling = {} if named else config.get("rope_scaling") or {}
    both = {
        kind: {"rope_theta": config.get(field, theta), **(named.get(kind) or {})}
        for kind, (field, theta) in GEMMA_THETAS.items()
    }
    both["full_attention"] |= scaling
    whole, local = (
        _rope_of(path, {**config, "rope_parameters": values}, family, positions, head_dim)
        for values in both.values()
    )
    return whole, local


def _rope_of(path: Path, config: dict[str, Any], family: Family, positions: int, head_dim: int) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older checkpoints."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values: dict[str, Any] = config.get(field) or {}
    check_types(path, values)
    theta = float(values.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = values.get("rope_type", values.get("type", "default"))
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # name in the first checkpoints of phi3
    if kind not in ROPE_TYPES:
        raise SettingsError(
            f"{path}: {field} of type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    share = float(values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if share != 1.0 and (not family.partial_rotation or kind not in ("default", "longrope")):
        raise SettingsError(
            f"{path}: {field} with partial_rotary_factor = {share!r} is not supported by the megatron backend"
        )
    interleaved = bool(config.get("rope_interleave", True)) if family.latent else family.interleaved
    shape: dict[str, Any] = {"partial_rotary_factor": share, "interleaved": interleaved}
    if kind == "default":
        return Rope(theta, **shape)
    # transformers prefers this field outside the table, if present.
    original = config.get("original_max_position_embeddings") or values.get(
        "original_max_position_embeddings", positions
    )
    known = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    shape |= {key: float(values[key]) for key in known if values.get(key)}
    factor = values.get("factor")
    factor = positions / original if factor is None else float(factor)
    if kind == "longrope":
        shape |= _factors(path, field, values, int(head_dim * share) // 2)
    return Rope(
        theta,
        kind,
        factor,
        original_max_position_embeddings=int(original),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_attention_factor(kind, values, factor, int(original)),
        score_factor=_score_factor(values, factor) if family.latent else 1.0,
        **shape,
    )


def _factors(path: Path, field: str, values: dict[str, Any], count: int) -> dict[str, tuple[float, ...]]:
    """Read the divisors of longrope, one per frequency."""
    if unknown := sorted({"short_mscale", "long_mscale"} & set(values)):
        raise SettingsError(f"{path}: {field} with {unknown[0]} is not supported by the megatron backend")
    found = {}
    for name in ("short_factor", "long_factor"):
        found[name] = tuple(
            float(factor) for factor in values.get(name) or () if isinstance(factor, int | float)
        )
        if len(found[name]) != count:
            raise SettingsError(f"{path}: {field} has {len(found[name])} numbers in {name}, not {count}")
    return found


def _attention_factor(kind: str, values: dict[str, Any], factor: float, original: int) -> float:
    """Return the factor of queries and keys: as given, or derived from the growth of the context."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    ours, whole = values.get("mscale"), values.get("mscale_all_dim")
    return _grown(factor, ours) / _grown(factor, whole) if ours and whole else _grown(factor, 1.0)


def _score_factor(values: dict[str, Any], factor: float) -> float:
    whole = values.get("mscale_all_dim")
    return _grown(factor, whole) ** 2 if whole else 1.0


def _grown(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
