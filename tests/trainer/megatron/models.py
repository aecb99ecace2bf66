"""Makes tiny checkpoints and batches, and trains them in plain torch for comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from protocol.device.hf_models import apply_config
from trainer.algorithms.base import Algorithm
from trainer.algorithms.grpo import Grpo
from trainer.batch import Batch, StepTotals, trained_tokens
from trainer.config import AlgorithmConfig, OptimizerConfig

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT = {
    "vocab_size": 96,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
SHARED_EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "attention_factor": 1.2,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}
GEMMA = {"vocab_size": 96, "sliding_window": 5, "query_pre_attn_scalar": 24, "pad_token_id": None}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GLM = {"vocab_size": 96, "pad_token_id": None, "eos_token_id": 1}
HYBRID = {
    "vocab_size": 96,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "pad_token_id": None,
}
ALTERNATING = ["full_attention", "sliding_attention"]
MODELS = {
    "qwen2": ("Qwen2", {"vocab_size": 131, "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"vocab_size": 96, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-tied": ("Qwen3", {"vocab_size": 131, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama": (
        "Llama",
        {
            "vocab_size": 96,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3_ROPE,
            "num_key_value_heads": 4,
        },
    ),
}
"""Trained in every layout."""
MORE_MODELS = {
    "mistral": ("Mistral", {"vocab_size": 96, "sliding_window": 5}),
    "olmo2": ("Olmo2", {"vocab_size": 96, "tie_word_embeddings": False, "pad_token_id": None}),
    "qwen3-yarn": (
        "Qwen3",
        {"vocab_size": 96, "tie_word_embeddings": False, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "vocab_size": 96,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "vocab_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mixtral": ("Mixtral", {"vocab_size": 96, "num_local_experts": 4, "pad_token_id": None}),
    "phi3": ("Phi3", {"vocab_size": 131, "tie_word_embeddings": False, "pad_token_id": None}),
    "deepseek-v3-dense": (
        "DeepseekV3",
        {
            **LATENT,
            "first_k_dense_replace": 2,
            "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v2-dense": ("DeepseekV2", {**LATENT, "first_k_dense_replace": 2, "q_lora_rank": None}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            **SHARED_EXPERTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **SHARED_EXPERTS,
            "vocab_size": 96,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "pad_token_id": None,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "vocab_size": 96,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
            "pad_token_id": None,
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "vocab_size": 131,
            "pad_token_id": None,
            "head_dim": 16,
            "original_max_position_embeddings": 9,
            "rope_parameters": LONGROPE,
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "vocab_size": 131, "layer_types": ALTERNATING[::-1], "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma": ("Gemma", {"vocab_size": 131, "pad_token_id": None}),
    "phi": ("Phi", {"vocab_size": 131}),
    "glm": ("Glm", GLM),
    "glm4": ("Glm4", GLM),
    "starcoder2": ("Starcoder2", {"vocab_size": 96, "sliding_window": 5}),
    "qwen3-windows": (
        "Qwen3",
        {
            "vocab_size": 96,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ALTERNATING,
        },
    ),
    "ministral": ("Ministral", {"vocab_size": 96, "sliding_window": 5, "layer_types": ALTERNATING}),
    "qwen3.5": ("Qwen3_5Text", HYBRID),
    "qwen3-next": (
        "Qwen3Next",
        {
            **HYBRID,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "llama-biases": ("Llama", {"vocab_size": 96, "attention_bias": True, "mlp_bias": True}),
}
"""Trained in few layouts: these differ from the others in what every layout treats alike."""
HYBRIDS = ("qwen3.5", "qwen3-next")
"""Models with gated delta nets, whose samples share no prefix."""
DEEP_MODELS = {
    "qwen3-deep": (
        "Qwen3",
        {"vocab_size": 131, "tie_word_embeddings": True, "num_hidden_layers": 4},
    ),
    "qwen2-deep": ("Qwen2", {"vocab_size": 96, "tie_word_embeddings": False, "num_hidden_layers": 4}),
}
"""Trained in layouts for which two layers are too few. The vocabulary of the first has an odd size, so it is
padded for two tensor ranks, and its embedding is the output layer."""
ALL_MODELS = MODELS | MORE_MODELS | DEEP_MODELS
BALANCE = {"qwen3-moe": {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01}}
"""Model -> settings of the trainer that balance its experts; others have none."""
EXPERTS = {
    "deepseek_v2": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""What checkpoints call the parts of experts: the block, gate, up and down."""
SHARDED = "llama"
"""Saved in several files, with an index."""
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, adam_eps=1e-5, clip_grad=0.5)


def make_config(name: str, **overrides: object) -> PretrainedConfig:
    family, fields = ALL_MODELS[name]
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(**{**BASE, **fields, **overrides})
    return config


def make_model(name: str, **overrides: object) -> PreTrainedModel:
    """A model without a trivial tensor: norms and biases differ from 1 and 0."""
    family, _ = ALL_MODELS[name]
    config = make_config(name, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in [*model.parameters(), *buffers_of(model).values()]:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    apply_config(model)
    return model


def buffers_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint holds."""
    return {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint has: transformers stacks experts, and joins gate and up."""
    block, *parts = EXPERTS.get(model.config.model_type, ("",))
    result = buffers_of(model)
    for name, tensor in model.named_parameters():
        layer, _, kind = name.partition("mlp.experts.")
        if not kind or not block:
            renamed = name.replace("mlp.", f"{block}.") if block else name
            result[renamed] = tensor
            continue
        for number, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            names = parts[:2] if kind == "gate_up_proj" else parts[2:]
            for part, half in zip(names, halves, strict=True):
                result[f"{layer}{block}.experts.{number}.{part}.weight"] = half
    return result


def save_model(name: str, directory: Path) -> Path:
    path = directory / name
    if not path.exists():
        make_model(name).save_pretrained(path, max_shard_size="100KB" if name == SHARDED else "1GB")
    return path


def make_batch(
    name: str,
    seed: int = 0,
    *,
    samples: int = 13,
    length: int = 12,
    prompt: int = 4,
    temperature: float = 0.7,
) -> Batch:
    """Responses of unequal length; some sampled tokens are over the bound, one sample trains no token at
    all."""
    vocabulary = int(ALL_MODELS[name][1]["vocab_size"])
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(prompt + 1, length + 1, (samples,), generator=generator)
    lengths[0] = length
    position = torch.arange(length)
    inside = position < lengths[:, None]
    sampled = inside & (position >= prompt)
    trained = sampled & (torch.rand(samples, length, generator=generator) < 0.8)
    trained[1:2] = False
    tokens = torch.randint(0, vocabulary, (samples, length), generator=generator)
    behaviour = (-4.5 + 0.5 * torch.randn(samples, length, generator=generator)) * sampled
    advantages = torch.randn(samples, 1, generator=generator) * trained
    versions = torch.where(sampled, torch.where(position % 2 == 0, seed, seed - 1), -1)
    lags = (seed - versions)[trained]
    return Batch(
        step=seed,
        totals=StepTotals(samples, int(trained.sum()), int(lags.max()), bool((lags == 0).any())),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        tokens=tokens[inside].int(),
        loss_mask=trained[inside],
        sampled_mask=sampled[inside],
        behaviour_logprobs=behaviour[inside],
        versions=versions[inside].int(),
        advantages=advantages[inside],
        group_index=torch.arange(samples) // 4,
        rewards=torch.rand(samples, generator=generator),
        weights=Grpo(AlgorithmConfig()).sample_weights(sampled.sum(1)),
        measured=torch.ones(samples, dtype=torch.bool),
        temperature=temperature,
    )


def step_batch(name: str, step: int) -> Batch:
    """The batch of a step; that of step 1 is one sample, so with several replicas one has none."""
    return make_batch(name, step, samples=1 if step == 1 else 13)


def plain_logprobs(model: Callable[[torch.Tensor], Any], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[t] log-probabilities of the tokens and entropies, from the model's own logits, a sample at a time."""
    logprobs, entropies = [], []
    for tokens in batch.tokens.long().split(batch.lengths.tolist()):
        table = torch.log_softmax(model(tokens[None]).logits[0, :-1].float() / batch.temperature, -1)
        logprobs += [table.new_zeros(1), table.gather(-1, tokens[1:, None])[:, 0]]
        entropies += [table.new_zeros(1), -(table.exp() * table).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def plain_loss(
    algorithm: Algorithm, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> torch.Tensor:
    """The loss of a step, from [t] arrays."""
    mask, tokens = batch.loss_mask, trained_tokens(batch)
    terms = algorithm.token_loss(
        tokens, logprobs[mask], entropy[mask] if algorithm.config.entropy_coef else None
    )
    return (terms.loss * tokens.weights).sum()
