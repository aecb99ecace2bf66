"""Prepares megatron's tensor-parallel layers: parameters, attributes, weight gradients, collectives."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    layers,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.head import add_product
from trainer.megatron.convert.rules import Direct, Rule


def empty_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of a model with this configuration."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def whole_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter that is replicated on every tensor rank.

    With `sequence_parallel`, each rank has only its own tokens, and an attribute makes megatron sum the
    gradient over the ranks.
    """
    parameter = empty_parameter(config, *shape)
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def mark_split(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> None:
    """Mark the parameters that are split over tensor ranks.

    Gradient norms count marked parameters on every rank, and replicated parameters once. megatron sets the
    marks during random initialization, which weights of a checkpoint skip.

    Args:
        parameters: megatron name -> parameter.
        rules: rules of the parameters to mark.
    """
    for rule in rules:
        parameter = parameters[rule.parameter]
        if not isinstance(rule, Direct) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=rule.dim, stride=1)


def skip_collectives(model: torch.nn.Module) -> None:
    """Disable the collectives in linear layers that are not split over ranks.

    With one rank, megatron's collectives return their input, but each adds an autograd function to both
    passes.
    """
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.disable_grad_reduce = True
        elif isinstance(layer, RowParallelLinear):
            layer.explicit_expert_comm = True


def skip_gradients(model: torch.nn.Module) -> None:
    """Make linear layers multiply outside autograd, with the operator that megatron's function calls."""
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer._forward_impl = _product  # type: ignore[method-assign]


def _product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any
) -> torch.Tensor:
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


def install_weight_gradients() -> None:
    """Make linear layers accumulate weight gradients in their float32 buffers, without a 16-bit copy.

    megatron's `gradient_accumulation_fusion` needs a kernel of an extension (Apex) for this; torch has an
    equal product. Call before building a model.
    """
    products = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    layers.fused_weight_gradient_mlp_cuda = products
    layers._grad_accum_fusion_available = True


def _accumulate(inputs: torch.Tensor, outputs_grad: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, outputs_grad, inputs)
