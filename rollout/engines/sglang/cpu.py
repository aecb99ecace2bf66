"""Gives SGLang what it lacks where there is no GPU: latent attention, divided experts, unpinned memory."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn


def pin_nothing() -> None:
    """Keep SGLang from pinning host memory, such as recorded experts."""
    with suppress(ImportError):
        from sglang.srt.mem_cache.pool_host import common

        common._cuda_host_register = lambda *unused: None


def attend_to_latents() -> None:
    """Have SGLang's attention in torch compute with latent vectors.

    It reads keys and values from its cache alone, where latent attention keeps vectors, but is handed
    expanded keys and values with the first tokens of a request.
    """
    with suppress(ImportError):  # an older release
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

        handlers.AttentionBackendRegistry.register(
            "torch_native", lambda attention, batch: handlers.AttnForwardMethod.MLA
        )


def divide_experts() -> None:
    """Have SGLang's experts in torch leave out the choices of other ranks' experts.

    These have the number -1, which SGLang 0.5.23 takes for an index.
    """
    with suppress(ImportError):  # an older release
        from sglang.srt.layers.moe import fused_moe_native as experts

        whole = experts.moe_forward_native

        def compute(layer: nn.Module, x: torch.Tensor, choices: Any, config: Any) -> torch.Tensor:
            own = choices.topk_ids >= 0  # [tokens, choices]
            if own.all():
                return whole(layer, x, choices, config)
            outputs = torch.zeros_like(x)
            if own.any():
                tokens = own.nonzero()[:, 0]
                rows = choices._replace(  # of one choice each
                    topk_ids=choices.topk_ids[own][:, None], topk_weights=choices.topk_weights[own][:, None]
                )
                outputs.index_add_(0, tokens, whole(layer, x[tokens], rows, config))
            return outputs

        experts.moe_forward_native = compute
