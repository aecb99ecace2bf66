"""Defines the rules of multi-head latent attention."""

from trainer.megatron.architecture.latent import Latent
from trainer.megatron.convert.rules import Direct, Rule, Split


def latent_rules(latent: Latent, hidden: int, heads: int, here: str, there: str) -> list[Rule]:
    """Return the rules of a layer: every tensor rank has its heads, and all of what makes the low ranks.

    Args:
        latent: sizes of the attention.
        hidden: hidden size.
        heads: of the whole model.
        here: what megatron's names begin with.
        there: what those of the checkpoint begin with.
    """

    def whole(parameter: str, name: str, *shape: int) -> Rule:
        return Direct(parameter=f"{here}{parameter}.weight", name=f"{there}{name}.weight", shape=shape)

    def by_heads(parameter: str, name: str, rank: int, of_head: int) -> Rule:
        return Split(
            parameter=f"{here}{parameter}.weight",
            name=f"{there}{name}.weight",
            shape=(heads * of_head, rank),
            unit=of_head,
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
            parameter=here + "linear_proj.weight",
            name=there + "o_proj.weight",
            shape=(hidden, heads * latent.value),
            dim=1,
            unit=latent.value,
        ),
    ]
