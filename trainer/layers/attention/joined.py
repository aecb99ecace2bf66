"""Merges attention over several sets of keys, so keys need not be copied next to all their queries.

Attention over one set of keys yields an output o and the log-sum-exp l of its scores. Attention over two sets
is o = o_1 exp(l_1 - l) + o_2 exp(l_2 - l) with l = log(exp(l_1) + exp(l_2)). A sink is a score s in a query's
softmax without a value: o = o_1 exp(l_1 - l) with l = log(exp(l_1) + exp(s)). The backward pass of a kernel
recomputes the probabilities from the log-sum-exp, and subtracts the products of output and gradient. Given
the merged o and l, each kernel therefore computes its exact share of the gradients of queries, keys and
values (as in ring attention: Liu et al. 2023, arXiv 2310.01889).

Copies of keys are not saved; the backward pass recreates them.

Shapes: T queries; C T gathered keys; n queries and m keys of a part; D head size. Heads are the heads of this
tensor rank.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from trainer.layers.attention.visible import SharedKeys, VisibleKeys


def seen_rows(rows: torch.Tensor, keys: VisibleKeys | None) -> torch.Tensor:
    """Return the gathered rows [C T, heads, any size] that pieces see, [K, heads, any size]."""
    if keys is None or keys.tokens is None:
        return rows
    seen: torch.Tensor = _Seen.apply(rows, keys)
    return seen


def add_copies(gradient: torch.Tensor, keys: VisibleKeys | None, rows: int) -> torch.Tensor:
    """Return the gradient of `rows` gathered rows from the gradient of the visible rows, [K, ...].

    Gradients of copies are summed in float32 or wider, in a fixed order.
    """
    if keys is None or keys.tokens is None:
        return gradient
    total = gradient.new_zeros(rows, *gradient.shape[1:])
    exact = torch.promote_types(gradient.dtype, torch.float32)
    for chosen, copies in keys.copies:
        found = gradient.index_select(0, copies.flatten())
        if copies.size(1) > 1:
            found = found.unflatten(0, copies.shape).sum(1, dtype=exact).to(gradient.dtype)
        total.index_copy_(0, chosen, found)
    return total


class _Seen(torch.autograd.Function):
    """Copies of the rows that pieces see."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
        ctx.keys, ctx.rows = keys, len(rows)
        assert keys.tokens is not None
        return rows.index_select(0, keys.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_copies(gradient, ctx.keys, ctx.rows), None


def spread_queries(query: torch.Tensor, keys: VisibleKeys) -> torch.Tensor:
    """Scatter queries [T, heads, D] into zeros, [K, heads, D]: each query at the row of its token's key.

    For kernels that need as many queries as keys. `keys.queries` selects the queries' rows of the result.
    """
    rows = query.new_zeros(len(query) if keys.tokens is None else len(keys.tokens), *query.shape[1:])
    return rows.index_copy(0, keys.queries, query)


class Part(Protocol):
    """Kernel for the attention of some queries to some keys."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [n, heads, D] and the log-sum-exp of the scores, float32 or wider [heads, n].

        Args:
            q: [n, heads, D].
            k: [m, kv heads, D].
            v: [m, kv heads, D].
        """
        ...

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v from the gradient of the merged output.

        Args:
            out_grad: [n, heads, D].
            q: [n, heads, D].
            k: [m, kv heads, D].
            v: [m, kv heads, D].
            out: [n, heads, D]: merged output.
            total: [heads, n]: merged log-sum-exp.
        """
        ...


def joined_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: VisibleKeys | None,
    own_part: Part,
    shared: Sequence[Part],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [T, heads, D] to a piece's own keys merged with attention to shared keys.

    Args:
        q: [T, heads, D].
        k: [C T, kv heads, D].
        v: [C T, kv heads, D].
        keys: keys visible to each piece; None: only the piece's own keys.
        own_part: attention to a piece's own keys and the copied keys before them.
        shared: attention to each of `keys.shared`.
        sinks: [heads], scores in the softmax without a value.
    """
    out: torch.Tensor = _Joined.apply(q, k, v, sinks, keys, own_part, shared)
    return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        keys: VisibleKeys | None,
        own_part: Part,
        shared: Sequence[Part],
    ) -> torch.Tensor:
        join = _compiled() if q.is_cuda else _join
        out, total = own_part.forward(q, seen_rows(k, keys), seen_rows(v, keys))
        calls = list(_calls(keys, shared))
        out = out.to(_sum_dtype(q, calls))
        for call, part in calls:
            queries, seen = call.queries, call.tokens
            found = part.forward(queries.take(q), seen.take(k), seen.take(v))
            rows, scores = join(queries.take(out), queries.take(total.t()).t(), *found)
            queries.put(out, rows)
            queries.put(total.t(), scores.t())
        if sinks is not None:
            alone = total
            total = torch.logaddexp(alone, sinks.to(alone)[:, None])
            out = out * (alone - total).exp().t()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.keys, ctx.own_part, ctx.calls = keys, own_part, calls
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        out_grad, keys = out_grad.contiguous(), ctx.keys
        visible = seen_rows(k, keys), seen_rows(v, keys)
        q_grad, *copies = ctx.own_part.backward(out_grad, q, *visible, out, total)
        k_grad, v_grad = (add_copies(gradient, keys, len(k)) for gradient in copies)
        q_grad = q_grad.to(_sum_dtype(q, ctx.calls))
        for call, part in ctx.calls:
            queries, seen = call.queries, call.tokens
            q_more, k_more, v_more = part.backward(
                *(queries.take(x) for x in (out_grad, q)),
                *(seen.take(x) for x in (k, v)),
                queries.take(out),
                queries.take(total.t()).t().contiguous(),
            )
            queries.add(q_grad, q_more)
            seen.add(k_grad, k_more)
            seen.add(v_grad, v_more)
        sinks_grad = None
        if sinks is not None:
            shares = (sinks.to(total)[:, None] - total).exp()
            products = (out_grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
            sinks_grad = -(shares * products.t()).sum(-1).to(sinks.dtype)
        return q_grad.to(q.dtype), k_grad, v_grad, sinks_grad, None, None, None


def _calls(keys: VisibleKeys | None, shared: Sequence[Part]) -> Iterator[tuple[SharedKeys, Part]]:
    return zip(() if keys is None else keys.shared, shared, strict=True)


def _sum_dtype(q: torch.Tensor, calls: Sequence[object]) -> torch.dtype:
    """Return the dtype for merging: float32 for several parts; one merge rounds only once in any case."""
    return torch.promote_types(q.dtype, torch.float32) if len(calls) > 1 else q.dtype


def _join(
    out: torch.Tensor, total: torch.Tensor, other_out: torch.Tensor, other_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged output and log-sum-exp of n queries."""
    joined = torch.logaddexp(total, other_total)
    first, second = ((part - joined).exp().t()[..., None] for part in (total, other_total))
    return (out * first + other_out * second).to(out.dtype), joined


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_join, dynamic=True)
