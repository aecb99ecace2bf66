"""Computes the sizes of adapters in a layer of a family. Does not import torch."""

from protocol.weights.lora import ALL_LINEAR, LoraConfig
from trainer.megatron.families.numbers import Architecture


def adapted_sizes(a: Architecture, adapters: LoraConfig) -> list[tuple[int, int]]:
    """Return the sizes (in, out) of a layer's weights with adapters, over all tensor ranks."""
    q, k = a.heads * a.head_dim, a.kv_heads * a.head_dim
    into, out_of = (a.hidden, a.intermediate), (a.intermediate, a.hidden)
    sizes = {
        "q_proj": (a.hidden, (1 + a.family.output_gate) * q),
        "k_proj": (a.hidden, k),
        "v_proj": (a.hidden, k),
        "o_proj": (q, a.hidden),
        "gate_proj": into,
        "up_proj": into,
        "down_proj": out_of,
        "c_fc": into,
        "c_proj": out_of,
        "dense": (q, a.hidden),
        "fc1": into,
        "fc2": out_of,
    }
    if low := a.latent:
        sizes["o_proj"] = a.heads * low.value, a.hidden
        sizes["q_b_proj"] = low.query_rank, q
        sizes["kv_b_proj"] = low.kv_rank, a.heads * (low.nope + low.value)
    asked = _linear_names(a) if adapters.target_modules == ALL_LINEAR else adapters.target_modules
    return [size for name, size in sizes.items() if name in asked]


def _linear_names(a: Architecture) -> set[str]:
    """Return the layers that "all-linear" selects, without those of dense layers in models with experts."""
    names = {a.family.attention_output}
    if low := a.latent:
        names |= {"kv_b_proj", "q_b_proj" if low.query_rank else "q_proj"}
    elif not a.family.fused_qkv:
        names |= {"q_proj", "k_proj", "v_proj"}
    if not a.experts.count:
        names |= {a.family.mlp_names[-1]} if a.family.fused_gate_up else set(a.family.mlp_names)
    return names
