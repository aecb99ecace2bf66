"""Tests that the jaxtyping annotations of the pure functions hold for arguments and results."""

import inspect
from collections import abc
from collections.abc import Callable
from typing import Any, get_args, get_origin

import pytest
import torch
from jaxtyping import jaxtyped

from trainer.functional.advantages import group_centred, group_normalised, leave_one_out
from trainer.functional.logprobs import token_logprobs
from trainer.functional.losses import (
    cispo_loss,
    clipped_surrogate,
    k1_kl,
    k2_kl,
    k3_kl,
    keep_mask,
    log_ratio_limit,
    probability_ratio,
    ratio_at_level,
    truncated_weight,
)
from trainer.functional.weights import constant, sample_mean, sample_sum, token_mean

K = torch.zeros(3)
N, INDEX = torch.zeros(4), torch.tensor([0, 0, 1, 1])
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (token_logprobs, (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), 1.0)),
    (probability_ratio, (K, K)),
    (clipped_surrogate, (K, K, 0.2, 0.2)),
    (cispo_loss, (K, K, K, 0.2, 0.2)),
    (ratio_at_level, (K, "geometric", lambda x: x)),
    (truncated_weight, (K, "token", 2.0, lambda x: x)),
    (keep_mask, (K, "sequence", 0.5, 2.0, lambda x: x)),
    (log_ratio_limit, (K, 0.1)),
    (k1_kl, (K, K)),
    (k2_kl, (K, K)),
    (k3_kl, (K, K)),
    (group_normalised, (N, INDEX, 1e-4)),
    (group_centred, (N, INDEX)),
    (leave_one_out, (N, INDEX)),
    (sample_mean, (INDEX,)),
    (token_mean, (INDEX,)),
    (sample_sum, (INDEX,)),
    (constant, (INDEX, 0)),
]


def fits(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is tuple:
        return all(fits(v, a) for v, a in zip(value, get_args(annotation), strict=True))
    if get_origin(annotation) is abc.Callable:
        return callable(value)
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
