"""Lists the supported families of models, and how each differs from Llama."""

from dataclasses import dataclass

from trainer.megatron.architecture.experts import ExpertNames


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
    latent: bool = False
    """Whether attention is latent (MLA): queries, keys and values are made of vectors of low rank."""
    sinks: bool = False
    """Whether each head has a learnt score to which attention goes that no token gets."""
    extra_layers: bool = False
    """Whether checkpoints may hold layers after the last one, which predict further tokens (MTP)."""
    experts: ExpertNames | None = None
    """What the parts of layers with experts are called; None: no layer has any."""


BIASED_SIGMOID = ExpertNames(
    shared="shared_experts",
    normalized=True,
    defaults={"scoring": "sigmoid", "bias": True, "best_of_group": 2, "precise": True},
    fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
"""Experts of DeepSeek-V3 and its like."""
FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        latent=True,
        experts=ExpertNames(
            shared="shared_experts",
            defaults={"precise": True},
            fixed={
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                "norm_topk_prob": (False,),  # transformers ignores it
            },
        ),
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", latent=True, extra_layers=True, experts=BIASED_SIGMOID),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", windowed=True, default_window=4096),
    "mixtral": Family(
        "MixtralForCausalLM",
        windowed=True,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", normalized=True),
    ),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="projection", post_norms=True),
    "phi3": Family("Phi3ForCausalLM", fused=True, windowed=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        experts=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm="head", experts=ExpertNames()),
}
"""model_type -> family. docs/models.md says how to add one."""
SUPPORTED = {model_type: family.name for model_type, family in FAMILIES.items()}
"""model_type -> the architecture that exports name."""
