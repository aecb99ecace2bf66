"""Computes log-probabilities and entropies from hidden states: output layer and softmax combined.

Logits are computed in chunks of tokens. Up to a limit of some gigabytes per micro-batch, logits are kept for
the backward pass. Beyond, the backward pass recomputes them, which saves memory for a third more arithmetic
in this layer.

Shapes: k tokens, c of a chunk, H hidden size, V vocabulary, P tensor ranks; rank r has rows [r V' / P, (r +
1) V' / P) of the output weight, where V' is V with padding.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.layers.limits import LOGITS_CHUNK_BYTES, LOGITS_KEPT_BYTES

PRODUCT_BLOCK = 1 << 20
"""Elements of a product that a CPU adds to float32 at a time, unless a single row has more."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Shard of the vocabulary on this rank."""

    vocabulary: int
    """V, without padding."""
    rank: int = 0
    size: int = 1
    """P."""
    group: dist.ProcessGroup | None = None
    """Process group of the tensor ranks; not needed for P = 1."""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    softcap: float = 0.0,
    rank: int = 0,
    size: int = 1,
    group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax((hidden weight^T + bias) / temperature) at the targets, and the entropy, in nats.

    All ranks of the group return the same result. In the backward pass each rank computes the gradient of its
    weight shard and this shard's contribution to the gradient of the hidden states. The caller sums the
    contributions over the ranks. Padding rows are ignored, as if their logits were minus infinity.

    If megatron's `main_grad` of the weight is float32, the gradient is added to `main_grad` directly.

    Args:
        hidden: [k, H], any float dtype; the softmax is computed in float32.
        weight: [V' / P, H].
        targets: int64 [k] in [0, V).
        vocabulary: V, without padding.
        temperature: sampling temperature of the tokens; positive.
        softcap: bound c of the logits z, which become c tanh(z / c) before the division; 0: unbounded.
        rank: this tensor rank.
        size: number of tensor ranks.
        group: process group of the tensor ranks; not needed for one rank.
        bias: [V' / P], of the output layer; None: zeros.

    Returns:
        float32 [k] log-probabilities and float32 [k] entropies, both with gradient.
    """
    part = VocabularyPart(vocabulary, rank, size, group)
    logprobs, entropies = _LinearLogprobs.apply(hidden, weight, bias, targets, part, temperature, softcap)
    return logprobs, entropies


@torch.no_grad()
def linear_logprobs_no_grad(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    softcap: float = 0.0,
    rank: int = 0,
    size: int = 1,
    group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of `linear_logprobs`, float32 [k], without entropies and gradients.

    All chunks share one buffer of logits. On a CPU the softmax is computed in place.
    """
    part = VocabularyPart(vocabulary, rank, size, group)
    count = weight.size(0)
    valid, local, is_local = _local_targets(targets, part, count)
    sums = _no_sums(len(hidden), hidden.device)
    chunk = _chunk_rows(hidden, count)
    room = hidden.new_empty(min(chunk, len(hidden)), count)
    for first in range(0, len(hidden) if valid else 0, chunk):
        span = slice(first, first + chunk)
        logits = room[: len(hidden[span])]
        torch.mm(hidden[span], weight.t(), out=logits)
        if bias is not None:
            logits += bias
        kernels = _kernels(logits)
        sums[:, span] = kernels.statistics_in_place(logits, local[span], valid, temperature, softcap)
    sums = _over_ranks(sums, is_local, part)[0]
    return sums[3] - sums[1].log()


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T right to `total`. With a float32 total, 16-bit products are rounded only in the sum.

    Args:
        total: [m, n], float32 or the dtype of the factors.
        left: [t, m].
        right: [t, n].
    """
    if left.dtype is total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:  # by blocks of rows: the float32 product of a block stays in the CPU's cache
        rows = max(1, PRODUCT_BLOCK // right.size(1))
        for part, columns in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            part += columns.t() @ right


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies with the gradients of both by the logits.

    d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H), where z are the softcapped logits
    over the temperature, p = softmax(z), and H is the entropy of p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        part: VocabularyPart,
        temperature: float,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, count = len(hidden), weight.size(0)
        valid, local, is_local = _local_targets(targets, part, count)
        sums = _no_sums(rows, hidden.device)
        chunk = _chunk_rows(hidden, count)
        nbytes = rows * count * hidden.element_size()
        keep = any(ctx.needs_input_grad) and nbytes <= LOGITS_KEPT_BYTES[hidden.device.type]
        logits_kept = []
        for first in range(0, rows if valid else 0, chunk):
            span = slice(first, first + chunk)
            logits = _logits(hidden[span], weight, bias)
            sums[:, span] = _kernels(logits).statistics(logits, local[span], valid, temperature, softcap)
            if keep:
                logits_kept.append(logits)
        sums, highest = _over_ranks(sums, is_local, part)
        _, total, weighted, chosen = sums
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(
            hidden, weight, bias, local, is_local, highest + log_total, entropies, *logits_kept
        )
        ctx.temperature, ctx.softcap, ctx.valid, ctx.chunk = temperature, softcap, valid, chunk
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, local, is_local, normalizer, entropies, *logits_kept = ctx.saved_tensors
        zeros = torch.zeros_like(entropies)
        logprobs_grad, entropies_grad = (zeros if given is None else given.float() for given in gradients)
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = _WeightGradient(weight) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for number, first in enumerate(range(0, len(hidden) if ctx.valid else 0, ctx.chunk)):
            span = slice(first, first + ctx.chunk)
            logits = logits_kept[number] if logits_kept else _logits(hidden[span], weight, bias)
            _kernels(logits).to_slopes(
                logits,
                local[span],
                is_local[span],
                normalizer[span],
                entropies[span],
                logprobs_grad[span],
                entropies_grad[span],
                ctx.valid,
                ctx.temperature,
                ctx.softcap,
            )
            torch.mm(logits, weight, out=hidden_grad[span])
            if weight_grad is not None:
                weight_grad.add(logits, hidden[span])
            if bias_grad is not None:
                bias_grad += logits.sum(0, dtype=torch.float32)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.result(),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *[None] * 4,
        )


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())


def _local_targets(
    targets: torch.Tensor, part: VocabularyPart, count: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the rank's number of unpadded rows, local target indices, and which targets are on this rank."""
    valid = min(max(part.vocabulary - part.rank * count, 0), count)
    local = targets - part.rank * count
    is_local = (local >= 0) & (local < valid)
    return valid, torch.where(is_local, local, 0), is_local


def _no_sums(rows: int, device: torch.device) -> torch.Tensor:
    """Return the result of `statistics` for an empty vocabulary.

    The rows are: the highest logit; the sum of exponentials and the sum of exponential times logit, both
    relative to the highest logit; and the target's logit.
    """
    sums = torch.zeros(4, rows, device=device)
    sums[0] = -torch.inf
    return sums


def _over_ranks(
    sums: torch.Tensor, is_local: torch.Tensor, part: VocabularyPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over the whole vocabulary relative to its highest logit, and this logit.

    A collective.
    """
    highest = sums[0].clone()
    if part.size > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=part.group)
        shift = (sums[0] - highest).nan_to_num(neginf=-1e30)
        scale = shift.exp()
        sums[2] = scale * (sums[2] + shift * sums[1])
        sums[1] *= scale
    sums[3] = torch.where(is_local, sums[3] - highest, 0.0)
    if part.size > 1:
        dist.all_reduce(sums[1:], group=part.group)
    return sums, highest


class _WeightGradient:
    """Sum of the weight's gradient over chunks, in float32."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        main = getattr(weight, "main_grad", None)
        self._direct = isinstance(main, torch.Tensor) and main.dtype is torch.float32
        self._sum: Any = main
        if not self._direct:
            self._sum = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, logits_grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the product of [c, V' / P] and [c, H]."""
        add_product(self._sum, logits_grad, hidden)

    def result(self) -> torch.Tensor:
        """Return the tensor that autograd adds to the weight's gradient."""
        if not self._direct:
            return cast(torch.Tensor, self._sum.to(self._weight.dtype))
        # Megatron's own layers do the same: the gradient of a marked weight is already in main_grad.
        # Autograd's result is added only if the weight has another use (the input embedding).
        self._weight.grad_added_to_main_grad = True
        shared = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if shared else torch.empty_like(self._weight)


def _chunk_rows(hidden: torch.Tensor, count: int) -> int:
    """Return the tokens per chunk; the chunks of a batch have about equal size."""
    most = max(1, LOGITS_CHUNK_BYTES[hidden.device.type] // max(1, count * hidden.element_size()))
    chunks = max(1, -(-len(hidden) // most))
    return max(1, -(-len(hidden) // chunks))


def _kernels(logits: torch.Tensor) -> Any:
    """Return the softmax module for the logits' device."""
    if logits.is_cuda:
        from trainer.layers import softmax_triton

        return softmax_triton
    from trainer.layers import softmax_torch

    return softmax_torch
