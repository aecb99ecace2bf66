"""Sends rows to the ranks of their experts, and returns the outputs.

Shapes: T tokens of this rank, H hidden size, E experts of the layer, k of them per token; R = T k rows, one
per token and chosen expert. A group has P Q ranks: P with different experts, times Q that share each expert.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all

from trainer.layers.attention.visible import to_device


class ExpertOrder:
    """Order of rows by expert, then by token."""

    def __init__(self, chosen: torch.Tensor, experts: int) -> None:
        """Sort the rows.

        Args:
            chosen: int64 [T, k]: experts of each token.
            experts: E.
        """
        rows = chosen.flatten()
        self.copies = chosen.size(1)
        self.index = rows.argsort(stable=True)
        self.inverse = _inverse(self.index)
        self.counts = torch.zeros(experts, dtype=torch.int64, device=rows.device)
        """int64 [E], on the device: number of rows per expert."""
        self.counts.scatter_add_(0, rows, torch.ones_like(rows))

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sorted rows [R, H] of tokens [T, H]."""
        return _take(x, self.index, self.inverse, self.copies)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows, [T, H].

        Args:
            rows: [R, H], sorted.
            weights: [T, k]: factors of a token's rows, in the order of `chosen`.
        """
        if rows.is_cuda:
            found: torch.Tensor = _Combine.apply(rows.contiguous(), weights.contiguous(), self.inverse)
            return found
        by_token = _take(rows, self.inverse, self.index, 1).unflatten(0, (-1, self.copies))
        return torch.bmm(weights[:, None], by_token)[:, 0]


class Exchange:
    """All-to-all exchange of sorted rows with the ranks of their experts, and of gradients in backward.

    Each of the Q ranks that share an expert receives all of its rows, and computes a summand of the result.
    """

    def __init__(self, counts: torch.Tensor, size: int, copies: int, group: dist.ProcessGroup) -> None:
        """Exchange the row counts. A collective that synchronizes host and device.

        Args:
            counts: int64 [E], on the device: number of this rank's rows per expert.
            size: P.
            copies: Q.
            group: group of the P Q ranks; ranks that share experts are adjacent.
        """
        self.group, self._copies = group, copies
        sent = counts.view(size, -1).repeat_interleave(copies, 0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        to, of = torch.stack([sent, received]).cpu()
        self._sent, self._received = to.sum(1).tolist(), of.sum(1).tolist()
        self.counts = of.sum(0)
        """int64 [E / P], on the host: number of rows per expert of this rank."""
        experts = torch.arange(of.size(1)).repeat(of.size(0)).repeat_interleave(of.flatten())
        self._index = to_device(experts.argsort(stable=True), counts.device)
        self._inverse = _inverse(self._index)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks for this rank's experts, sorted by expert."""
        if self._copies > 1:
            blocks = rows.split(self._sent[:: self._copies])
            rows = torch.cat([block for block in blocks for _ in range(self._copies)])
        received = all_to_all(self.group, rows, self._received, self._sent)
        return _take(received, self._index, self._inverse, 1)

    def return_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's own rows, in the order in which they were sent."""
        rows = _take(rows, self._inverse, self._index, 1)
        rows = all_to_all(self.group, rows, self._sent, self._received)
        if self._copies == 1:
            return rows
        parts = rows.split(self._sent)
        firsts = range(0, len(parts), self._copies)
        return torch.cat([torch.stack(parts[first : first + self._copies]).sum(0) for first in firsts])


class _Take(torch.autograd.Function):
    """Gather of rows, possibly with repetition. The gradient is a sum in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        if ctx.copies == 1:
            return gradients[0].index_select(0, inverse), None, None, None
        if gradients[0].is_cuda:
            return _kernels().combine(gradients[0].contiguous(), inverse, None, ctx.copies), None, None, None
        by_token = gradients[0].index_select(0, inverse).unflatten(0, (-1, ctx.copies))
        return by_token.sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Autograd function of `ExpertOrder.combine` on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, places)
        found: torch.Tensor = _kernels().combine(rows, places, weights, weights.size(1))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights, places = ctx.saved_tensors
        rows_grad, weights_grad = _kernels().combine_backward(
            gradients[0].contiguous(), rows, places, weights
        )
        return rows_grad, weights_grad, None


def _kernels() -> Any:
    """Return the module of kernels, which only hosts with a GPU can import."""
    from trainer.megatron.layers.experts import combine_triton

    return combine_triton


def _take(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
    taken: torch.Tensor = _Take.apply(x, index, inverse, copies)
    return taken


def _inverse(index: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(index), device=index.device)
    return torch.empty_like(index).scatter_(0, index, places)
