"""Builds tiny models with experts, latent attention or adapters for tests of engines."""

import copy
from typing import TypeVar

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.contract.models import VOCAB, randomize, weights

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 1024,
}
Model = TypeVar("Model", bound=PreTrainedModel)


def tiny_experts(
    seed: int, *, dense: tuple[int, ...] = (1,), chosen: int = 2, dtype: torch.dtype = torch.float32
) -> Qwen3MoeForCausalLM:
    """Qwen3 with experts in those of its two layers that are not `dense`, otherwise as `tiny_model`.

    Each token has the `chosen` of 4 experts: all, where rounding in half precision would choose others.
    """
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=chosen,
        mlp_only_layers=list(dense),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return model


def tiny_latent(
    seed: int, *, yarn: bool = False, dtype: torch.dtype = torch.float32
) -> DeepseekV2ForCausalLM:
    """DeepSeek-V2, whose latent attention is of the size that kernels have; every token has all experts.

    With `yarn` its rotation is scaled, as SGLang wants on a CPU, where it has no experts of this family.
    """
    others = {"rope_parameters": dict(YARN)} if yarn else {}
    config = DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2 if yarn else 1,
        norm_topk_prob=False,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=2048,
        moe_layer_freq=1,  # SGLang reads it, and every published model has it
        scoring_func="softmax",  # the same
        **others,
    )
    model = DeepseekV2ForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return model


def tiny_gpt_oss(seed: int, *, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """gpt-oss with 4 experts, all of every token, otherwise as `tiny_model`."""
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_local_experts=4,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        swiglu_limit=7.0,  # SGLang reads it, and every published model has it
    )
    model = GptOssForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return model


def tiny_hybrid(seed: int, *, dtype: torch.dtype = torch.float32) -> Qwen3NextForCausalLM:
    """Qwen3-Next with a gated delta net and a layer of attention, and all 4 experts for every token."""
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,  # kernels have no smaller one
        linear_value_head_dim=128,
        max_position_embeddings=2048,
    )
    model = Qwen3NextForCausalLM(config).eval()
    randomize(model, seed, dtype)
    return model


def adapted(
    model: Model, lora: LoraConfig, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Model, dict[str, torch.Tensor]]:
    """Return the model with a random adapter merged into it, and the adapter as it is published."""
    parameters = weights(model)
    targets = adapter_targets({name: tuple(tensor.shape) for name, tensor in parameters.items()}, lora)
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_shapes(targets, lora.rank)
    adapter = {
        name: torch.empty(shape).normal_(0, 0.15, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    other = copy.deepcopy(model)
    with torch.no_grad():
        for target in targets:
            other.get_parameter(target.weight).add_(adapter[target.b].float() @ adapter[target.a].float())
    return other, adapter
