"""Computes attention with tanh-bounded scores (softcap), which torch's own kernels do not support.

Shapes: n sequences, A query heads, K key heads, L tokens, S keys, D head size.
"""

import math

import torch
from torch.utils.checkpoint import checkpoint

from trainer.layers.limits import SCORES_CHUNK_BYTES


def softcapped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    softcap: float,
    window: int = 0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(c tanh(s / c)) v for scores s = scale q k^T, with c = `softcap`, [n, A, L, D].

    Scores and softmax are float32. They are computed for a chunk of queries at a time and recomputed in the
    backward pass, which limits memory.

    Args:
        q: [n, A, L, D].
        k: [n, K, S, D].
        v: [n, K, S, D].
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: bound of the scores; positive.
        window: attention window in tokens, including the token itself; 0: unlimited. Ignored with a `mask`.
        mask: bool, expandable to [n, K, A / K, L, S], true where a query attends; None: causal, with L = S.
    """
    sequences, heads, tokens, size = q.shape
    factor = 1 / math.sqrt(size) if scale is None else scale
    grouped = q.unflatten(1, (k.size(1), -1))
    rows = max(1, SCORES_CHUNK_BYTES // (4 * sequences * heads * k.size(2)))
    outputs = []
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        begin, end = (0, k.size(2)) if mask is not None else _seen(first, last, window)
        outputs.append(
            checkpoint(
                _attend,
                grouped[:, :, :, first:last],
                k[:, :, begin:end],
                v[:, :, begin:end],
                _causal(first, last, begin, end, window, q.device) if mask is None else mask,
                factor,
                softcap,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(outputs, dim=3).flatten(1, 2)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attend with queries [n, K, A / K, rows, D] and return the same shape.

    Grouped heads share their keys.
    """
    products = q.flatten(2, 3).float() @ k.float().transpose(-1, -2)
    scores = (products.view(*q.shape[:4], -1) * (scale / softcap)).tanh() * softcap
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return (shares.flatten(2, 3) @ v).view_as(q)


def _seen(first: int, last: int, window: int) -> tuple[int, int]:
    """Return the first key that queries `first` to `last` attend to, and the key after their last."""
    return (max(0, first - window + 1) if window else 0), last


def _causal(first: int, last: int, begin: int, end: int, window: int, device: torch.device) -> torch.Tensor:
    """Return bool [last - first, end - begin], true where a query attends to a key."""
    distance = torch.arange(first, last, device=device)[:, None] - torch.arange(begin, end, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0
