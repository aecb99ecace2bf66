"""Lists the supported families of models and their differences from Llama.

`decoder.py` and the defaults of `Family` define Llama's names; the defaults of `ExpertNames` define names of
experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.megatron.families.experts import ExpertNames

PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
ATTENTION_BIAS = {"attention_bias": ("qkv", "output")}
GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
HYBRID = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
GLM = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of one model_type from Llama."""

    name: str
    """Class name in the config.json of exports."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases in every model of the family."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Switch in config.json -> projections with biases if set: `qkv`, `output` of attention, `mlp`."""
    qk_norm: str = ""
    """Norm of queries and keys before rotation: `head`, over each head; `projection`, over all heads."""
    qk_norm_switch: str = ""
    """Field of config.json that enables this norm; empty: always enabled."""
    norm: str = "rms"
    """Kind of norm: `rms`; `rms_from_one`, weighted by 1 + weight; `layer`, with mean and bias."""
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    """Norms of a layer: megatron name -> checkpoint name."""
    mlp: str = "swiglu"
    """Kind of the MLP: `swiglu`; `geglu`, gated by gelu with tanh; `gelu`, gelu with tanh without a gate."""
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Checkpoint names of the MLP's projections."""
    activations: tuple[str, ...] = ()
    """Names of the MLP's activation in config.json; empty: the usual names of its kind."""
    parallel_mlp: bool = False
    """Whether attention and MLP run in parallel: same input, and both outputs are added to the residual."""
    attention_output: str = "o_proj"
    """Checkpoint name of attention's output projection."""
    final_norm: str = "norm"
    """Checkpoint name of the norm after the last layer."""
    unused_dropouts: tuple[str, ...] = ()
    """Dropouts of pretraining that published files still contain; not applied."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    fused_qkv: bool = False
    """Whether the checkpoint stores q, k and v as one tensor."""
    fused_gate_up: bool = False
    """Whether the checkpoint stores gate and up as one tensor."""
    windows: str = ""
    """Layers with the window `sliding_window`: `all`; `layer_types`, the layers that this field names;
    `switch`, the same if `use_sliding_window` is set. Empty: none, and a config.json with a window is
    refused."""
    full_every: int = 0
    """n: without `layer_types`, every n-th layer has no window; 0: all layers have a window."""
    local_rope: bool = False
    """Whether layers with a window have their own rotary embedding."""
    partial_rotation: bool = False
    """Whether `partial_rotary_factor` is supported, the share of each head that is rotated."""
    interleaved: bool = False
    """Whether rotation pairs adjacent dimensions of a head, instead of its halves."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    activation_field: str = "hidden_act"
    eps_field: str = "rms_norm_eps"
    latent: bool = False
    """Whether attention is latent (MLA), see `Latent`."""
    output_gate: bool = False
    """Whether each head's output is multiplied by a gate, whose rows follow the head's query rows."""
    delta: str = ""
    """Names of the input projections of gated delta nets, see `delta.INPUTS`; empty: no layer has one."""
    sinks: bool = False
    """Whether each head has a sink: a learned score in the softmax without a value."""
    extra_layers: bool = False
    """Whether checkpoints may contain multi-token prediction (MTP) layers after the last layer."""
    experts: ExpertNames | None = None
    """Names of the experts in checkpoints; None: no layer has experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Field of config.json -> its default in transformers, for files that omit it."""

    @property
    def pre_norms(self) -> bool:
        """Whether norms precede attention and MLP."""
        return "input_layernorm" in self.norms

    @property
    def post_norms(self) -> bool:
        """Whether norms follow attention and MLP."""
        return "post_mlp_layernorm" in self.norms

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp != "gelu"


BIASED_SIGMOID = ExpertNames(
    shared="shared_experts",
    normalized=True,
    defaults={"scoring": "sigmoid", "bias": True, "best_of_group": 2, "precise": True},
    fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
"""Experts of DeepSeek-V3 and of families with the same router."""
FAMILIES = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        interleaved=True,
        latent=True,
        experts=ExpertNames(
            shared="shared_experts",
            defaults={"precise": True},
            fixed={
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                "norm_topk_prob": (False,),  # ignored by transformers
            },
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", interleaved=True, latent=True, extra_layers=True, experts=BIASED_SIGMOID
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        biases=ATTENTION_BIAS,
        norm="rms_from_one",
        mlp="geglu",
        activations=("gelu_pytorch_tanh", "gelu"),  # the first files say gelu, but transformers uses tanh
        scaled_embedding=True,
        defaults={"tie_word_embeddings": True, "head_dim": 256},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        biases=ATTENTION_BIAS,
        norm="rms_from_one",
        norms=GEMMA_NORMS,
        mlp="geglu",
        windows="layer_types",
        full_every=2,
        scaled_embedding=True,
        activation_field="hidden_activation",
        defaults={**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        biases=ATTENTION_BIAS,
        qk_norm="head",
        norm="rms_from_one",
        norms=GEMMA_NORMS,
        mlp="geglu",
        windows="layer_types",
        full_every=6,
        local_rope=True,
        scaled_embedding=True,
        activation_field="hidden_activation",
        defaults=GEMMA,
    ),
    "glm": Family(
        "GlmForCausalLM",
        biases={"attention_bias": ("qkv",)},
        fused_gate_up=True,
        partial_rotation=True,
        interleaved=True,
        defaults=GLM,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        biases={"attention_bias": ("qkv",)},
        norms={
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_mlp_layernorm",
        },
        fused_gate_up=True,
        partial_rotation=True,
        interleaved=True,
        defaults=GLM,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        biases={"attention_bias": ("qkv",)},
        qk_norm="head",
        qk_norm_switch="use_qk_norm",
        partial_rotation=True,
        extra_layers=True,
        experts=BIASED_SIGMOID,
        defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "n_shared_experts": 1},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        biases=ATTENTION_BIAS,
        windows="layer_types",
        full_every=2,
        sinks=True,
        experts=ExpertNames(
            router="router",
            normalized=True,
            stacked=True,
            defaults={"biases": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        ),
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000.0,
        },
    ),
    "llama": Family("LlamaForCausalLM", biases={**ATTENTION_BIAS, "mlp_bias": ("mlp",)}),
    "ministral": Family("MinistralForCausalLM", windows="layer_types", defaults={"sliding_window": 4096}),
    "mistral": Family("MistralForCausalLM", windows="all", defaults={"sliding_window": 4096}),
    "mixtral": Family(
        "MixtralForCausalLM",
        windows="all",
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", normalized=True),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm="projection",
        norms={
            "post_attention_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "phi": Family(
        "PhiForCausalLM",
        biases={"use_bias": ("qkv", "output", "mlp")},  # not in config.json: every model has biases
        norm="layer",
        norms={"input_layernorm": "input_layernorm"},
        mlp="gelu",
        mlp_names=("fc1", "fc2"),
        parallel_mlp=True,
        attention_output="dense",
        final_norm="final_layernorm",
        output_bias=True,
        partial_rotation=True,
        eps_field="layer_norm_eps",
        unused_dropouts=("resid_pdrop",),
        defaults={"use_bias": True, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        fused_qkv=True,
        fused_gate_up=True,
        windows="all",
        partial_rotation=True,
        defaults={"original_max_position_embeddings": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="switch", defaults={"sliding_window": 4096}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        biases={"qkv_bias": ("qkv",)},
        experts=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"),
        defaults={"qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        biases=ATTENTION_BIAS,
        qk_norm="head",
        windows="switch",
        defaults={"sliding_window": 4096},
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qk_norm="head",
        norm="rms_from_one",
        partial_rotation=True,
        output_gate=True,
        delta="apart",
        extra_layers=True,
        defaults=HYBRID,
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm="head", experts=ExpertNames()),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        qk_norm="head",
        norm="rms_from_one",
        partial_rotation=True,
        output_gate=True,
        delta="by_head",
        extra_layers=True,
        experts=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate", normalized=True),
        defaults=HYBRID,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        biases={"use_bias": ("qkv", "output", "mlp")},
        norm="layer",
        mlp="gelu",
        mlp_names=("c_fc", "c_proj"),
        windows="all",
        eps_field="norm_epsilon",
        defaults={"tie_word_embeddings": True, "use_bias": True, "norm_epsilon": 1e-5},
    ),
}
"""model_type -> family. docs/models.md describes how to add one."""
