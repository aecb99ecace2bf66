"""Defines what a layer computes token by token: the norms and the gated activation."""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [..., 2 F], in which the gate comes first.

    On a GPU it is megatron's fused kernel, which keeps its input alone for the backward pass.
    """
    if x.is_cuda:
        fused: torch.Tensor = SwiGLUFunction.apply(x, False, False)
        return fused
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, which sequence-parallel regions may contain.

    There each tensor rank has only its tokens; the mark on the weight, which megatron's own norm lacks, makes
    megatron add up its gradient over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class ProjectionNorm(torch.nn.Module):
    """Root mean square norm over all heads of a projection, of which each tensor rank has its part.

    Neither its weight nor its gradient is the same on two ranks, unlike those of other norms.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-6, **unused: Any
    ) -> None:
        """Take the size of a head as `hidden_size`, and the number of heads over all ranks."""
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        here = heads * hidden_size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(here, dtype=config.params_dtype, device=device))
        self.size = heads * hidden_size
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., heads of this rank, D] to the same shape."""
        flat = x.flatten(-2)
        squares = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=torch.float32).square()
        # Every rank's output depends on the sum, so its gradient is a sum over the ranks, too.
        whole = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(whole / self.size + self.eps)
        return (self.weight * normed).to(x.dtype).view_as(x)


class SwigluMLP(MLP):
    """megatron's MLP, without the choices that models here do not have: no bias, silu, gated."""

    def __init__(self, config: TransformerConfig, width: int = 0, **unused: Any) -> None:
        """Build it, as wide as `config` says or else `width`."""
        if width:
            config = copy.copy(config)
            config.ffn_hidden_size = width
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(
            config,
            linear,
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=mpu.get_tensor_model_parallel_group(),
        )

    def forward(self, hidden_states: torch.Tensor, *unused: Any, **also_unused: Any) -> Any:
        return self.linear_fc2(swiglu(self.linear_fc1(hidden_states)[0]))
