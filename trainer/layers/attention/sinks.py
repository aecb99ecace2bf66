"""Computes attention with sinks on torch's kernel for packed sequences, which itself knows none.

A sink is a score s that takes part in the softmax of a query and has no value. With the kernel's output o and
the log-sum-exp l of the scores, the result is o' = o exp(l - l') with l' = log(exp(l) + exp(s)). The kernel's
backward pass computes the probabilities again from the log-sum-exp, and subtracts the products of output and
gradient: with l' and o' in place of l and o it gives the gradients of queries, keys and values, exactly.

Shapes: T tokens, D head size; heads are this tensor rank's.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainer.layers.attention.sequences import PackedSequences
from trainer.layers.attention.terms import AttentionTerms


def varlen_attention_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    terms: AttentionTerms,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Return [T, heads, D] of q [T, heads, D], k and v [T, kv heads, D] and sinks [heads]."""
    import torch.nn.attention.varlen  # defines the operators

    out: torch.Tensor = _Attention.apply(q, k, v, sinks, sequences, terms)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        sequences: PackedSequences,
        terms: AttentionTerms,
    ) -> torch.Tensor:
        ctx.longest, ctx.scale, ctx.window = sequences.longest, terms.scale, [terms.window - 1, 0]
        ctx.longest_keys, key_offsets = sequences.longest_keys, sequences.key_offsets
        offsets = sequences.offsets
        out, scores, state = torch.ops.torch_attn._varlen_attn(
            q,
            k,
            v,
            offsets,
            key_offsets,
            ctx.longest,
            ctx.longest_keys,
            not terms.window,
            ctx.scale,
            ctx.window,
        )
        total = torch.logaddexp(scores, sinks.float()[:, None])  # [heads, T]
        out = (out * (scores - total).exp().t()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, offsets, key_offsets, state)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, total, offsets, key_offsets, state = ctx.saved_tensors
        q_grad, k_grad, v_grad = torch.ops.torch_attn._varlen_attn_backward(
            out_grad.contiguous(),
            q,
            k,
            v,
            out,
            total,
            offsets,
            key_offsets,
            ctx.longest,
            ctx.longest_keys,
            ctx.window[0] < 0,
            state,
            ctx.scale,
            ctx.window,
        )
        shares = (sinks.float()[:, None] - total).exp()
        sinks_grad = -(shares * (out_grad.float() * out.float()).sum(-1).t()).sum(-1)
        return q_grad, k_grad, v_grad, sinks_grad.to(sinks.dtype), None, None
