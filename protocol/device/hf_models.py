"""Building transformers models: one at a time in a process, as their config.json says, by trusted code."""

import threading
from typing import Any

MODEL_BUILDING = threading.Lock()
"""Held around `from_pretrained` and `from_config`.

transformers replaces methods of its base class while it builds a model (`no_tie_weights`, `no_init_weights`)
and restores what it found. Of two threads at once, each finds the other's replacements; the last one leaves
these in place, and no model loaded later in that process ties its embeddings.
"""

_trust = {"trust_remote_code": False}


def trust_model_code(is_trusted: bool) -> None:
    """Say whether this process may run Python files of the model directories that it loads."""
    _trust["trust_remote_code"] = is_trusted


def code_trust() -> dict[str, bool]:
    """Return the argument of transformers and vLLM that says so; without it transformers asks a terminal."""
    return dict(_trust)


def apply_config(model: Any) -> None:
    """Have a model compute what its config.json says where transformers would not.

    - transformers' default attention, torch's `scaled_dot_product_attention`, ignores
      `attn_logit_softcapping` (Gemma 2): these models write their scores out.
    - transformers before 5.13 clamps experts of gpt-oss at 7, slope 1.702, whatever the config says,
      and groups of experts of DeepSeek-V2 lack their number.

    Log-probabilities would differ from the ones that vLLM, SGLang and Megatron compute.
    """
    config = model.config
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    for module in model.modules():
        match type(module).__name__:
            case "GptOssExperts":
                module.limit = getattr(config, "swiglu_limit", module.limit)
                module.alpha = getattr(config, "swiglu_alpha", module.alpha)
            case "DeepseekV2Moe":
                module.num_experts = config.n_routed_experts
