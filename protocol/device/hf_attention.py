"""Chooses the attention of a transformers model where the default one leaves something out."""

from typing import Any


def use_whole_attention(model: Any) -> None:
    """Have a model whose config.json bounds attention scores compute them written out.

    transformers' default, torch's `scaled_dot_product_attention`, ignores `attn_logit_softcapping` (Gemma 2):
    log-probabilities would differ from the ones that vLLM, SGLang and Megatron compute.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
