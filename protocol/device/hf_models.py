"""Builds transformers models from their config.json, one at a time per process, with trusted code only."""

import threading
from typing import Any

MODEL_BUILDING = threading.Lock()
"""Lock held during `from_pretrained` and `from_config`.

While transformers builds a model, it replaces methods of its base class (`no_tie_weights`, `no_init_weights`)
and restores the previous methods afterwards. Two concurrent threads would each save the other's replacements.
The last thread would leave the replacements in place, and no model loaded later in the process would tie its
embeddings."""

_trust = {"trust_remote_code": False}


def trust_model_code(is_trusted: bool) -> None:
    """Set whether this process may run Python files from model directories."""
    _trust["trust_remote_code"] = is_trusted


def code_trust() -> dict[str, bool]:
    """Return the `trust_remote_code` argument of transformers and vLLM.

    Without the argument, transformers asks on the terminal.
    """
    return dict(_trust)


def apply_config(model: Any) -> None:
    """Make a model compute as its config.json says where transformers would not.

    - transformers' default attention, torch's `scaled_dot_product_attention`, ignores
      `attn_logit_softcapping` (Gemma 2): such models use eager attention.
    - transformers before 5.13 clamps gpt-oss experts at 7 with slope 1.702, regardless of the config, and
      does not set the number of experts of DeepSeek-V2 groups.

    Otherwise log-probabilities would differ from vLLM, SGLang and Megatron.
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
