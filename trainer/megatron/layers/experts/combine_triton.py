"""Combines the expert outputs of each token on a GPU, and computes the gradients, reading each row once.

Shapes: T tokens, H hidden size, k experts per token; R = T k rows.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

BLOCK = 1024


def combine(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, copies: int
) -> torch.Tensor:
    """Return the sum of each token's rows, [T, H], accumulated in float32.

    Args:
        rows: [R, H], contiguous.
        places: int64 [R]: indices into `rows`, k per token, ordered by token.
        weights: [T, k], contiguous: factors of the rows; None: 1.
        copies: k.
    """
    tokens, hidden = len(rows) // copies, rows.size(1)
    out = rows.new_empty(tokens, hidden)
    if tokens:
        _combine[(tokens, triton.cdiv(hidden, BLOCK))](
            rows,
            places,
            rows if weights is None else weights,
            out,
            hidden,
            COPIES=copies,
            WEIGHTED=weights is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `combine` with respect to rows, [R, H], and weights, [T, k].

    Args:
        grad: [T, H], contiguous: gradient of the combined rows.
        rows, places, weights: as in `combine`.
    """
    rows_grad, weights_grad = torch.empty_like(rows), torch.empty_like(weights)
    if len(rows):
        _combine_backward[(len(rows),)](
            grad,
            rows,
            places,
            weights,
            rows_grad,
            weights_grad,
            rows.size(1),
            COPIES=weights.size(1),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return rows_grad, weights_grad


@triton.jit
def _combine(
    rows,
    places,
    weights,
    out,
    hidden,
    COPIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + token * COPIES + copy)
        row = tl.load(rows + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * COPIES + copy).to(tl.float32)
        total += row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward(
    grad,
    rows,
    places,
    weights,
    rows_grad,
    weights_grad,
    hidden,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    copy = tl.program_id(0).to(tl.int64)
    place = tl.load(places + copy) * hidden
    token = (copy // COPIES) * hidden
    weight = tl.load(weights + copy).to(tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        grad_row = tl.load(grad + token + column, mask=inside, other=0.0).to(tl.float32)
        products += grad_row * tl.load(rows + place + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(rows_grad + place + column, (grad_row * weight).to(rows_grad.dtype.element_ty), mask=inside)
    tl.store(weights_grad + copy, tl.sum(products, 0).to(weights_grad.dtype.element_ty))
