"""Puts Hugging Face tensors together from the files of ranks, without the rules: by reshapes and cat only."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig

from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import EXPERTS, make_model
from trainer.config import ParallelConfig

Tensors = dict[str, torch.Tensor]
WHOLE = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.norm": "linear_attn.norm",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
"""What is the same on every rank: megatron's name -> that of the checkpoint."""
LATENT_WHOLE = {
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}
GEMMA_WHOLE = {"pre_mlp_layernorm": "pre_feedforward_layernorm"}
GLM4_WHOLE = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
}
WHOLE_OF = {
    "deepseek_v2": LATENT_WHOLE,
    "deepseek_v3": LATENT_WHOLE,
    "gemma2": GEMMA_WHOLE,
    "gemma3_text": GEMMA_WHOLE,
    "glm4": GLM4_WHOLE,
}
"""What differs from that, by model_type."""
ROWS = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.core_attention.sinks": "self_attn.sinks",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.a_log": "linear_attn.A_log",
}
"""What is split by rows."""
STACKED = {"fc1": ("gate_up_proj", 2), "fc2": ("down_proj", 1)}
STACKED |= {f"{name}_bias": (f"{tensor}_bias", 1) for name, (tensor, _) in STACKED.items()}
"""Experts in one tensor: megatron's name -> that of the checkpoint, and the dimension that ranks split."""


LAYERS = {
    "pp2-uneven": [[[0]], [[1, 2, 3]]],
    "pp2-vpp2": [[[0], [2]], [[1], [3]]],
    "pp2-vpp2-dp2": [[[0], [2]], [[1], [3]]],
    "tp2-pp2-vpp2": [[[0], [2]], [[1], [3]]],
    "pp2-uneven-tp2": [[[0, 1, 2]], [[3]]],
}
"""Layers of each chunk of each stage, where not all stages have as many, one after the other."""


def gather_by_hand(directory: Path, layout: str, model: str) -> Tensors:
    """The tensors of the files of ranks in `directory`."""
    config, parallel = make_model(model).config, LAYOUTS[layout]
    result = {}
    for stage, chunks in enumerate(chunks_by_hand(layout, config.num_hidden_layers)):
        files = files_of_stage(directory, parallel, stage)
        for held in files[0]:
            of_experts = ".experts." in held
            holders = files if of_experts else files[: parallel.tensor_model_parallel_size]
            parts, chunk, name = [file[held] for file in holders], "0", held
            if held.startswith("chunks."):
                _, chunk, name = held.split(".", 2)
            if name.startswith("decoder.layers."):
                local, kind = name.removeprefix("decoder.layers.").split(".", 1)
                by_hand = experts_by_hand if of_experts else layer_by_hand
                found = by_hand(kind, parts, config, parallel)
                layer = f"model.layers.{chunks[int(chunk)][int(local)]}."
                result |= {layer + key: value for key, value in found.items()}
            elif name.startswith("decoder.final_layernorm."):
                norm = "final_layernorm" if config.model_type == "phi" else "norm"
                result[f"model.{norm}." + name.rpartition(".")[2]] = parts[0]
            elif name == "output_layer.bias":
                result["lm_head.bias"] = torch.cat(parts)[: config.vocab_size]
            else:
                tied = config.tie_word_embeddings or name.startswith("embedding")
                table = "model.embed_tokens.weight" if tied else "lm_head.weight"
                result[table] = torch.cat(parts)[: config.vocab_size]
    return result


def chunks_by_hand(layout: str, layers: int) -> list[list[list[int]]]:
    """The layers of each chunk of each stage."""
    stages = LAYOUTS[layout].pipeline_model_parallel_size
    each = layers // stages
    return LAYERS.get(layout) or [[[*range(stage * each, (stage + 1) * each)]] for stage in range(stages)]


def files_of_stage(directory: Path, parallel: ParallelConfig, stage: int) -> list[Tensors]:
    """The parameters of the ranks of a stage."""
    ranks = parallel.world_size // parallel.pipeline_model_parallel_size
    return [load_file(directory / f"rank{stage * ranks + rank}.safetensors") for rank in range(ranks)]


def held_by(directory: Path, parallel: ParallelConfig, tp: int, stage: int) -> Tensors:
    """The parameters of a tensor rank of a stage."""
    return files_of_stage(directory, parallel, stage)[tp]


def experts_by_hand(
    kind: str, parts: list[torch.Tensor], config: PretrainedConfig, parallel: ParallelConfig
) -> Tensors:
    """The tensors of a parameter of a layer's experts, of all ranks of a stage."""
    etp, ep = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    for first in range(0, len(parts), ep * etp):
        assert all(torch.equal(a, b) for a, b in zip(parts[first:], parts[: ep * etp], strict=False))
    kind = kind.rpartition(".")[2]
    if config.model_type not in EXPERTS:
        name, dim = STACKED[kind]
        groups = [torch.cat(parts[first : first + etp], dim) for first in range(0, ep * etp, etp)]
        return {f"mlp.experts.{name}": torch.cat(groups)}
    block, gate, up, down = EXPERTS[config.model_type]
    result, number = {}, 0
    for first in range(0, ep * etp, etp):
        for matrices in zip(*parts[first : first + etp], strict=True):
            here = f"{block}.experts.{number}."
            number += 1
            if kind == "fc2":
                result[f"{here}{down}.weight"] = torch.cat(matrices, 1)
                continue
            halves = zip(*(matrix.chunk(2) for matrix in matrices), strict=True)
            for part, half in zip((gate, up), halves, strict=True):
                result[f"{here}{part}.weight"] = torch.cat(half)
    counts = {getattr(config, name, 0) for name in ("num_local_experts", "num_experts", "n_routed_experts")}
    assert number in counts
    return result


def layer_by_hand(
    kind: str, parts: list[torch.Tensor], config: PretrainedConfig, parallel: ParallelConfig
) -> Tensors:
    """The tensors of another parameter of a layer, of the tensor ranks."""
    layer, _, suffix = kind.rpartition(".")
    if layer.startswith("mlp.shared."):
        plain = layer_by_hand(kind.replace("shared.", ""), parts, config, parallel)
        block = "shared_expert" if config.model_type in ("qwen2_moe", "qwen3_next") else "shared_experts"
        return {name.replace("mlp.", f"mlp.{block}."): tensor for name, tensor in plain.items()}
    if kind in ("self_attention.in_proj.weight", "self_attention.conv"):
        return delta_by_hand(kind, torch.cat(parts), config)
    if layer.endswith("linear_qkv"):
        return qkv_by_hand(suffix, torch.cat(parts), config)
    if layer.endswith("linear_fc1"):
        return into_mlp_by_hand(suffix, parts, config.model_type)
    down = {"starcoder2": "mlp.c_proj", "phi": "mlp.fc2"}.get(config.model_type, "mlp.down_proj")
    output = "self_attn.dense" if config.model_type == "phi" else "self_attn.o_proj"
    columns = {
        "self_attention.linear_proj": output,
        "self_attention.out_proj": "linear_attn.out_proj",
        "mlp.linear_fc2": down,
    }
    if layer in columns:
        whole = torch.cat(parts, 1) if suffix == "weight" else parts[0]
        return {f"{columns[layer]}.{suffix}": whole}
    if layer in ROWS:
        return {f"{ROWS[layer]}.{suffix}": torch.cat(parts)}
    if kind in ROWS:
        return {ROWS[kind]: torch.cat(parts)}
    if config.model_type == "olmo2" and "self_attention" in kind:
        return {f"self_attn.{kind[len('self_attention.')]}_norm.weight": torch.cat(parts)}
    assert all(torch.equal(part, parts[0]) for part in parts)
    if layer == "mlp.router":
        return {router_by_hand(suffix, config.model_type): parts[0]}
    names = WHOLE | WHOLE_OF.get(config.model_type, {})
    return {f"{names[layer]}.{suffix}": parts[0]}


def router_by_hand(suffix: str, model_type: str) -> str:
    """The name of a tensor of a router."""
    if model_type == "gpt_oss":
        return "mlp.router." + {"logit_bias": "bias"}.get(suffix, suffix)
    return f"{EXPERTS[model_type][0]}.gate." + {"bias": "e_score_correction_bias"}.get(suffix, suffix)


def qkv_by_hand(suffix: str, fused: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """The tensors of queries, keys and values, which alternate by group."""
    groups, queries = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    heads = fused.view(groups, -1, config.head_dim, *fused.shape[1:])
    pieces = heads.split([heads.size(1) - 2, 1, 1], 1)
    if heads.size(1) == 2 * queries + 2:  # the gates of a group, which follow each query in the checkpoint
        pieces = pieces[0].unflatten(1, (2, queries)).transpose(1, 2), *pieces[1:]
    split = [part.reshape(-1, *fused.shape[1:]) for part in pieces]
    if config.model_type == "phi3":
        return {"self_attn.qkv_proj.weight": torch.cat(split)}
    return {f"self_attn.{x}_proj.{suffix}": part for x, part in zip("qkv", split, strict=True)}


def delta_by_hand(kind: str, fused: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """The tensors of a gated delta net whose rows alternate by key head."""
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * values // heads
    by_head = fused.view(heads, -1, *fused.shape[1:])
    here = "linear_attn."
    if kind.endswith("conv"):
        return {
            f"{here}conv1d.weight": torch.cat([x.flatten(0, 1) for x in by_head.split([key, key, value], 1)])
        }
    if config.model_type == "qwen3_next":
        pieces = zip(("qkvz", "ba"), by_head.split([2 * (key + value), 2 * values // heads], 1), strict=True)
        return {f"{here}in_proj_{name}.weight": piece.flatten(0, 1) for name, piece in pieces}
    small = values // heads
    q, k, v, *others = (x.flatten(0, 1) for x in by_head.split([key, key, value, value, small, small], 1))
    found = zip(("qkv", "z", "b", "a"), (torch.cat([q, k, v]), *others), strict=True)
    return {f"{here}in_proj_{name}.weight": tensor for name, tensor in found}


def into_mlp_by_hand(suffix: str, parts: list[torch.Tensor], model_type: str) -> Tensors:
    """The tensors of the first projections of an MLP."""
    if model_type in ("starcoder2", "phi"):
        return {f"mlp.{'fc1' if model_type == 'phi' else 'c_fc'}.{suffix}": torch.cat(parts)}
    gate, up = (torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True))
    if model_type in ("phi3", "glm", "glm4"):
        return {"mlp.gate_up_proj.weight": torch.cat([gate, up])}
    return {f"mlp.gate_proj.{suffix}": gate, f"mlp.up_proj.{suffix}": up}
