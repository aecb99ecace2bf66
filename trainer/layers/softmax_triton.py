"""Computes a softmax over the vocabulary and its gradient on a GPU, each in one pass over the logits.

The functions are documented in `softmax_torch`.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

BLOCK = 4096
SLOPE_BLOCK = 2048


def statistics(
    logits: torch.Tensor, local: torch.Tensor, valid: int, temperature: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return float32 [4, c], see `softmax_torch.statistics`."""
    rows = len(logits)
    out = torch.empty(4, rows, device=logits.device)
    _statistics[(rows,)](
        logits,
        local,
        out,
        logits.stride(0),
        valid,
        1.0 / temperature,
        softcap,
        rows,
        CAPPED=softcap > 0,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out


statistics_in_place = statistics
"""Alias: the kernel reads the logits once, and the unneeded sum costs no time."""


def to_slopes(
    logits: torch.Tensor,
    local: torch.Tensor,
    is_local: torch.Tensor,
    normalizer: torch.Tensor,
    entropies: torch.Tensor,
    logprobs_grad: torch.Tensor,
    entropies_grad: torch.Tensor,
    valid: int,
    temperature: float,
    softcap: float = 0.0,
) -> None:
    """Replace logits by the gradient with respect to them, see `softmax_torch.to_slopes`."""
    rows, width = logits.shape
    _to_slopes[(rows, triton.cdiv(width, SLOPE_BLOCK))](
        logits,
        local,
        is_local.to(torch.int8),
        normalizer,
        entropies,
        logprobs_grad,
        entropies_grad,
        logits.stride(0),
        width,
        valid,
        1.0 / temperature,
        softcap,
        CAPPED=softcap > 0,
        BLOCK=SLOPE_BLOCK,
        num_warps=4,
    )


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _statistics(
    logits, local, out, stride, valid, scale, softcap, rows, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    highest, total, weighted = -1.0e30, 0.0, 0.0
    for start in range(0, valid, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < valid
        scaled = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
        if CAPPED:
            scaled = tl.where(inside, softcap * _tanh(scaled / softcap), scaled)
        scaled *= scale
        new = tl.maximum(highest, tl.max(scaled, 0))
        shift = highest - new
        exponential = tl.exp(scaled - new)
        old = tl.exp(shift)
        weighted = old * (weighted + shift * total)
        weighted += tl.sum(tl.where(inside, exponential * (scaled - new), 0.0), 0)
        total = old * total + tl.sum(exponential, 0)
        highest = new
    chosen = tl.load(base + tl.load(local + row)).to(tl.float32)
    if CAPPED:
        chosen = softcap * _tanh(chosen / softcap)
    chosen *= scale
    tl.store(out + row, highest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, chosen)


@triton.jit
def _to_slopes(
    logits,
    local,
    is_local,
    normalizer,
    entropies,
    logprobs_grad,
    entropies_grad,
    stride,
    width,
    valid,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < valid
    logprob_grad = tl.load(logprobs_grad + row)
    entropy_grad = tl.load(entropies_grad + row)
    scaled = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    inner = 1.0
    if CAPPED:
        bounded = _tanh(scaled / softcap)
        inner = 1 - bounded * bounded
        scaled = softcap * bounded
    scaled *= scale
    log_p = scaled - tl.load(normalizer + row)
    slope = tl.exp(log_p) * (-logprob_grad - entropy_grad * (log_p + tl.load(entropies + row)))
    chosen = (column == tl.load(local + row)) & (tl.load(is_local + row) != 0)
    slope = tl.where(chosen, slope + logprob_grad, slope) * scale * inner
    tl.store(base + column, tl.where(inside, slope, 0.0).to(logits.dtype.element_ty), mask=column < width)
