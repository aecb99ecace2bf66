"""Adds weight gradients of megatron's linear layers to their float32 buffers, without a 16-bit copy between.

megatron does that with a kernel of an extension (Apex); torch has the same product since 2.8.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers

from trainer.megatron.layers.head import add_product


def install() -> None:
    """Give megatron the products for `gradient_accumulation_fusion`. Call it before a model is built."""
    products = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    layers.fused_weight_gradient_mlp_cuda = products
    layers._grad_accum_fusion_available = True


def _accumulate(inputs: torch.Tensor, outputs_grad: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, outputs_grad, inputs)
