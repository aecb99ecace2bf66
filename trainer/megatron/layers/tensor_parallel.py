"""Makes and marks parameters of megatron's tensor-parallel layers, and their weight gradients."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.head import add_product
from trainer.megatron.convert.rules import Direct, Rule


def empty_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of a model with this configuration."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def whole_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter that every tensor rank has whole.

    With `sequence_parallel` each rank has only its tokens: the mark makes megatron add up its gradient over
    the ranks.
    """
    parameter = empty_parameter(config, *shape)
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def mark_split(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> None:
    """Mark the parameters that are split over tensor ranks.

    Gradient norms count marked parameters on every rank, and replicated ones once. megatron sets the marks
    when it initializes weights at random, and weights of a checkpoint are not initialized.

    Args:
        parameters: name in megatron -> parameter.
        rules: rules of parameters to mark.
    """
    for rule in rules:
        parameter = parameters[rule.parameter]
        if not isinstance(rule, Direct) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=rule.dim, stride=1)


def install_weight_gradients() -> None:
    """Have linear layers add weight gradients to their float32 buffers, without a 16-bit copy between.

    megatron does that by `gradient_accumulation_fusion` with a kernel of an extension (Apex); torch has the
    same product. Call it before a model is built.
    """
    products = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    layers.fused_weight_gradient_mlp_cuda = products
    layers._grad_accum_fusion_available = True


def _accumulate(inputs: torch.Tensor, outputs_grad: torch.Tensor, total: torch.Tensor) -> None:
    add_product(total, outputs_grad, inputs)
