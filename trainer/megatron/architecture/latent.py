"""Reads the sizes of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of a layer. Queries, and keys together with values, are made of vectors of low rank.

    Of a head's query and key, the last `rope` dimensions carry the position; those of the key are the same
    for all heads.
    """

    kv_rank: int
    """Rank of keys and values."""
    nope: int
    """Dimensions of a head's query and key without a position."""
    rope: int
    """Those with it."""
    value: int
    """Dimensions of a head's value."""
    query_rank: int = 0
    """Rank of queries; 0: they are made of the hidden state directly."""

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's query and key."""
        return self.nope + self.rope


def latent_of(path: Path, config: dict[str, Any]) -> Latent:
    """Read them from a config.json; `path` is that of the file, for errors.

    Raises:
        SettingsError: the numbers of query and of key-value heads differ.
    """
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise SettingsError(
            f"{path}: num_key_value_heads = {kv_heads} is not supported with latent attention: it must be "
            f"num_attention_heads, {heads}"
        )
    return Latent(
        kv_rank=int(config["kv_lora_rank"]),
        nope=int(config["qk_nope_head_dim"]),
        rope=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
    )
