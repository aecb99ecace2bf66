"""Tests that the jaxtyping annotations of the pure functions hold for arguments and results."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_origin

import pytest
import torch
from jaxtyping import jaxtyped

from trainer.functional.advantages import group_centred, group_normalised
from trainer.functional.logprobs import token_logprobs
from trainer.functional.losses import clipped_surrogate, k3_kl, probability_ratio, truncated_importance_weight

K = torch.zeros(3)
N, INDEX = torch.zeros(4), torch.tensor([0, 0, 1, 1])
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (token_logprobs, (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), 1.0)),
    (probability_ratio, (K, K)),
    (clipped_surrogate, (K, K, 0.2, 0.2)),
    (truncated_importance_weight, (K, K, 2.0)),
    (k3_kl, (K, K)),
    (group_normalised, (N, INDEX, 1e-4)),
    (group_centred, (N, INDEX)),
]


def fits(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is tuple:
        return all(fits(v, a) for v, a in zip(value, get_args(annotation), strict=True))
    return isinstance(value, annotation)


@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_annotations_hold_for_arguments_and_results(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signature = inspect.signature(function)
    with jaxtyped("context"):
        for (name, value), parameter in zip(
            signature.bind(*arguments).arguments.items(), signature.parameters.values(), strict=True
        ):
            assert fits(value, parameter.annotation), name
        assert fits(function(*arguments), signature.return_annotation)
