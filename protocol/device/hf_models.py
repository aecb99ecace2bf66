"""Building transformers models: one at a time in a process, with whole attention scores, by trusted code."""

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


def use_whole_attention(model: Any) -> None:
    """Have a model whose config.json bounds attention scores compute them written out.

    transformers' default, torch's `scaled_dot_product_attention`, ignores `attn_logit_softcapping` (Gemma 2):
    log-probabilities would differ from the ones that vLLM, SGLang and Megatron compute.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
