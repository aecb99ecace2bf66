"""Adds missing CPU features to SGLang: latent attention, experts sharded over ranks, unpinned memory."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn


def pin_nothing() -> None:
    """Keep SGLang from pinning host memory, such as that of recorded experts."""
    with suppress(ImportError):
        from sglang.srt.mem_cache.pool_host import common

        common._cuda_host_register = lambda *unused: None


def attend_to_latents() -> None:
    """Let SGLang's torch attention compute with latent vectors.

    The backend reads keys and values only from its cache, which contains latent vectors. For the first tokens
    of a request, however, latent attention passes expanded keys and values.
    """
    with suppress(ImportError):  # older SGLang
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        handlers.AttentionBackendRegistry.register(
            "torch_native", lambda attention, batch: handlers.AttnForwardMethod.MLA
        )


def divide_experts() -> None:
    """Let SGLang's torch experts skip choices of experts on other ranks.

    Such choices are -1, which SGLang 0.5.23 uses as an index.
    """
    with suppress(ImportError):  # older SGLang
        from sglang.srt.layers.moe import fused_moe_native as experts

        whole = experts.moe_forward_native

        def compute(layer: nn.Module, x: torch.Tensor, choices: Any, config: Any) -> torch.Tensor:
            own = choices.topk_ids >= 0  # [tokens, choices]
            if own.all():
                return whole(layer, x, choices, config)
            outputs = torch.zeros_like(x)
            if own.any():
                tokens = own.nonzero()[:, 0]
                rows = choices._replace(  # one choice per row
                    topk_ids=choices.topk_ids[own][:, None], topk_weights=choices.topk_weights[own][:, None]
                )
                outputs.index_add_(0, tokens, whole(layer, x[tokens], rows, config))
            return outputs

        experts.moe_forward_native = compute
