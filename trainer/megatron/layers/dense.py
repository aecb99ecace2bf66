"""Defines per-token computations: norms, activations, MLPs, and the value head of a critic."""

import copy
import functools
from collections.abc import Callable
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

from trainer.megatron.layers.tensor_parallel import empty_parameter, whole_parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), weight, eps)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [..., 2 F], where the gate comes first.

    On a GPU, megatron's fused kernel stores only its input for the backward pass.
    """
    if x.is_cuda:
        fused: torch.Tensor = SwiGLUFunction.apply(x, False, False)
        return fused
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of gelu."""
    return F.gelu(x, approximate="tanh")


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of [..., 2 F], where the gate comes first.

    On a GPU, a compiled kernel stores only its input for the backward pass.
    """
    return (_compiled_geglu() if x.is_cuda else _geglu)(x)


def _geglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate) * up


@functools.cache
def _compiled_geglu() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(_geglu, dynamic=True)


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, with support for sequence parallelism.

    With sequence parallelism, each tensor rank has only its own tokens. An attribute of the weight, missing
    in megatron's norm, makes megatron sum its gradient over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.init.ones_(whole_parameter(config, hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class NormFromOne(RMSNorm):
    """Root mean square norm weighted by 1 + weight; computed in float32 and rounded once."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LayerNorm(RMSNorm):
    """Norm by mean and standard deviation over the last dimension, with a bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.init.zeros_(whole_parameter(config, hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.size(-1),), self.weight, self.bias, self.eps)


NORMS: dict[str, type[RMSNorm]] = {"rms": RMSNorm, "rms_from_one": NormFromOne, "layer": LayerNorm}
"""`Family.norm` -> class of the layers' norms, the head norms and the final norm."""


class ProjectionNorm(torch.nn.Module):
    """Root mean square norm over all heads of a projection, split over the tensor ranks.

    Unlike other norms' weights, the weight and its gradient differ between ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-6, **unused: Any
    ) -> None:
        """Create the norm.

        `hidden_size` is the size of a head, `heads` the number of heads over all ranks.
        """
        super().__init__()
        here = heads * hidden_size // config.tensor_model_parallel_size
        self.weight = torch.nn.init.ones_(empty_parameter(config, here))
        self.size = heads * hidden_size
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., heads of this rank, D] to the same shape."""
        flat = x.flatten(-2)
        squares = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=torch.float32).square()
        # Every rank's output depends on the sum, so the gradient of the sum is also a sum over the ranks.
        whole = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(whole / self.size + self.eps)
        return (self.weight * normed).to(x.dtype).view_as(x)


class SwigluMLP(MLP):
    """megatron's MLP with this project's activations. The caller adds the output bias."""

    activation = staticmethod(swiglu)

    def __init__(self, config: TransformerConfig, width: int = 0, **unused: Any) -> None:
        """Build the MLP with the given width, by default the width in `config`."""
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
        wide, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation(wide if bias is None else wide + bias))


class GegluMLP(SwigluMLP):
    """MLP with a gelu gate."""

    activation = staticmethod(geglu)


class GeluMLP(SwigluMLP):
    """MLP with gelu and without a gate."""

    activation = staticmethod(gelu)


MLPS: dict[str, type[SwigluMLP]] = {"swiglu": SwigluMLP, "geglu": GegluMLP, "gelu": GeluMLP}
"""`Family.mlp` -> class of the layers' MLPs."""


def by_heads(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    """Return a projection without bias, with outputs split over the tensor ranks."""
    return ColumnParallelLinear(inputs, outputs, config=config, init_method=config.init_method, bias=False)


def joining_heads(config: TransformerConfig, inputs: int) -> RowParallelLinear:
    """Return a projection to the hidden size without bias, with inputs split over the tensor ranks."""
    return RowParallelLinear(
        inputs,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )


class BiasedRow(RowParallelLinear):
    """megatron's row-parallel layer that always has a bias."""

    def __init__(self, *sizes: int, bias: bool, **others: Any) -> None:
        super().__init__(*sizes, bias=True, **others)


class ValueHead(torch.nn.Module):
    """Linear layer from a hidden state to one value, which replaces a critic's output layer.

    Replicated on every tensor rank.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Create the layer with uninitialized weights."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.empty(1, dtype=dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values of hidden states [k, H], float32 [k]."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]
