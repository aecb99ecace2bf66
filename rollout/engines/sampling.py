"""Samples from logits in plain PyTorch, with log-probabilities of the sampled distribution."""

import math
from collections.abc import Sequence

import torch

from protocol.errors import EngineError
from rollout.engines.base import Sampling

TOGETHER = 64
"""Rows to sample at once, to limit memory."""


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return log-probabilities [V] of a single row, see `sampled_distributions`."""
    return sampled_distributions(logits[None], [sampling])[0]


def sampled_distributions(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return log-probabilities after temperature, top-k and top-p, in this order; greedy: at temperature 1.

    Args:
        logits: [B, V].
        samplings: sampling parameters of each row's request.

    Returns: [B, V] float32; -inf for tokens that cannot be sampled.
    """
    scores, device = logits.float(), logits.device
    temperatures = [each.temperature or 1.0 for each in samplings]
    if set(temperatures) != {1.0}:
        scores = scores / _on_device(temperatures, device)[:, None]
    limited = [n for n, each in enumerate(samplings) if each.temperature and (each.top_k or each.top_p < 1)]
    if limited:
        top_k = _on_device([samplings[n].top_k for n in limited], device)
        top_p = _on_device([samplings[n].top_p for n in limited], device)
        places = _on_device(limited, device)
        rows = scores.index_select(0, places)
        kept = rows.masked_fill(~kept_tokens(rows, top_k, top_p), -torch.inf)
        scores = scores.index_copy(0, places, kept)
    return scores.log_softmax(-1)


def _on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return the values as a tensor on the device, without synchronizing the host."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def kept_tokens(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the mask of tokens that top-k followed by top-p keeps.

    Top-k keeps the `top_k` best tokens and ties with the last of them. Top-p then keeps the smallest set
    whose probabilities reach `top_p`.

    Args:
        scores: [B, V] logits after temperature.
        top_k: [B]; disabled if 0 or above V.
        top_p: [B]; disabled if 1.

    Returns: [B, V] bool.
    """
    ordered, index = scores.sort(descending=True)
    size = scores.shape[-1]
    last = torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last[:, None]), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (ordered > -torch.inf) & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    return torch.zeros_like(kept).scatter(-1, index, kept)


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> list[tuple[int, float]]:
    """Sample a token from each row of `logits` [B, V]; return (token, log-probability) of each row.

    A row's token does not depend on other rows. The host synchronizes with the device once per `TOGETHER`
    rows.

    Raises:
        EngineError: a sampled row's logits are not finite.
    """
    found: list[tuple[int, float]] = []
    for first in range(0, len(samplings), TOGETHER):
        part = slice(first, first + TOGETHER)
        found += _sample(logits[part], samplings[part], generators[part])
    return found


def _sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> list[tuple[int, float]]:
    logprobs = sampled_distributions(logits.to(generators[0].device), samplings)
    noise = torch.ones_like(logprobs)
    for row, each, generator in zip(noise, samplings, generators, strict=True):
        if each.temperature:
            row.exponential_(generator=generator)
    # torch.multinomial computes the same argmax, but synchronizes with the device for every row
    shares = logprobs.exp() / noise
    if not all(each.temperature for each in samplings):
        greedy = _on_device([not each.temperature for each in samplings], logprobs.device)
        shares = torch.where(greedy[:, None], logprobs, shares)
    drawn = shares.argmax(-1, keepdim=True)
    found = torch.cat([drawn.double(), logprobs.gather(-1, drawn).double()], dim=-1).tolist()
    if any(each.temperature and math.isnan(value) for each, (_, value) in zip(samplings, found, strict=True)):
        raise EngineError("the model's logits are not finite")
    return [(int(token), value) for token, value in found]
