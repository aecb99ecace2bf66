"""Stands in for SGLang's kernels, which have no build for every CPU, so that SGLang itself runs in tests. On
its server's PYTHONPATH only.

Every name can be imported; to call one raises. One function is really needed.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    stride: int,
) -> None:
    """Write the KV places of new tokens into the rows of their requests.

    Args:
        req_pool_indices: [B] rows.
        req_to_token: [R, stride] places of every request's tokens; written in columns `start` to `end`.
        start: [B].
        end: [B].
        out_cache_loc: [sum(end - start)] places, request after request.
        stride: columns of a row.
    """
    done = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[done : done + last - first].to(req_to_token.dtype)
        done += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return absent
