"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): sizes and rules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.convert.rules import Direct, Rule, Split


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of a layer. Queries are projected from one low-rank vector, keys and values from another.

    The last `rope` dimensions of a head's query and key encode the position. All heads share the key in these
    dimensions.
    """

    kv_rank: int
    """Rank of keys and values."""
    nope: int
    """Dimensions of a head's query and key without position encoding."""
    rope: int
    """Dimensions of a head's query and key with position encoding."""
    value: int
    """Dimensions of a head's value."""
    query_rank: int = 0
    """Rank of queries; 0: queries are projected directly from the hidden state."""

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's query and key."""
        return self.nope + self.rope


def latent_of(path: Path, config: dict[str, Any]) -> Latent:
    """Read the sizes from a config.json.

    Args:
        path: path of the file, for errors.
        config: content of the file.

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


def latent_rules(latent: Latent, hidden: int, heads: int, mcore_prefix: str, hf_prefix: str) -> list[Rule]:
    """Return the rules of a layer. A tensor rank has a share of the heads, and all low-rank matrices.

    Args:
        latent: sizes of the attention.
        hidden: hidden size.
        heads: number of heads of the whole model.
        mcore_prefix: prefix of the parameters in megatron.
        hf_prefix: prefix of the tensors in the checkpoint.
    """

    def whole(parameter: str, name: str, *shape: int) -> Rule:
        return Direct(
            parameter=f"{mcore_prefix}{parameter}.weight", name=f"{hf_prefix}{name}.weight", shape=shape
        )

    def by_heads(parameter: str, name: str, rank: int, head_rows: int) -> Rule:
        return Split(
            parameter=f"{mcore_prefix}{parameter}.weight",
            name=f"{hf_prefix}{name}.weight",
            shape=(heads * head_rows, rank),
            unit=head_rows,
        )

    queries = [by_heads("linear_q_proj", "q_proj", hidden, latent.head_dim)]
    if rank := latent.query_rank:
        queries = [
            whole("linear_q_down_proj", "q_a_proj", rank, hidden),
            whole("q_layernorm", "q_a_layernorm", rank),
            by_heads("linear_q_up_proj", "q_b_proj", rank, latent.head_dim),
        ]
    return [
        *queries,
        whole("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.kv_rank + latent.rope, hidden),
        whole("kv_layernorm", "kv_a_layernorm", latent.kv_rank),
        by_heads("linear_kv_up_proj", "kv_b_proj", latent.kv_rank, latent.nope + latent.value),
        Split(
            parameter=mcore_prefix + "linear_proj.weight",
            name=hf_prefix + "o_proj.weight",
            shape=(hidden, heads * latent.value),
            dim=1,
            unit=latent.value,
        ),
    ]
