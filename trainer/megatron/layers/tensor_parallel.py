"""Marks parameters that are split over tensor ranks."""

from collections.abc import Iterable, Mapping

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from trainer.megatron.convert.rules import Direct, Rule


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
