"""Trains with plain Hugging Face and torch: what a step is compared with. Nothing of ours is imported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.benchmarks.gpu_trainer.shapes import PROMPT, Work

HEAD_ROWS = 4096
"""Tokens whose logits exist at a time; those of a whole micro-batch do not fit."""
_places: dict[str, Any] = {}


def split(lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Return micro-batches of about `budget` tokens, the longest samples first."""
    result: list[list[int]] = []
    for sample in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        last = result[-1] if result else []
        held = (
            len(last) * max((lengths[i] for i in last), default=0)
            if padded
            else sum(lengths[i] for i in last)
        )
        more = max([lengths[i] for i in last], default=0) if padded else lengths[sample]
        if last and held + more <= budget:
            last.append(sample)
        else:
            result.append([sample])
    return result


def make_step(
    directory: Path, work: Work, *, budget: int, packed: bool, compiled: bool
) -> Callable[[], None]:
    """Load the model and return a function that makes one step on the work."""
    AttentionInterface.register("varlen", _varlen)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="varlen" if packed else "sdpa"
    ).cuda()
    model.train()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
    body = torch.compile(model.model) if compiled else model.model
    score = torch.compile(_score, dynamic=True) if compiled else _score
    parts = split(work.lengths.tolist(), budget, padded=not packed)
    _places["width"], _places["samples"] = budget, max(map(len, parts)) + 1
    _places["longest"] = max(budget, int(work.lengths.max()))

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for part in parts:
            hidden, targets = (_packed if packed else _padded)(body, work, part)
            pieces = zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
            logprobs = torch.cat(
                [
                    checkpoint(score, rows, model.lm_head.weight, ids, use_reentrant=False)
                    for rows, ids in pieces
                ]
            )
            (-torch.exp(logprobs - logprobs.detach()).sum() / work.trained).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)

    return step


@torch.no_grad()
def exact_logprobs(directory: Path, work: Work, samples: int) -> torch.Tensor:
    """Return the log-probabilities of the responses of the first samples, in float32, one after the other."""
    if not samples:
        return torch.zeros(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    found = []
    for tokens in work.tokens[:samples]:
        ids = tokens.long().to(device)
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, PROMPT - 1 : -1]
        found += [
            _score(rows, model.lm_head.weight, targets)
            for rows, targets in zip(hidden.split(HEAD_ROWS), ids[PROMPT:].split(HEAD_ROWS), strict=True)
        ]
    exact = torch.cat(found).cpu()
    del model, found
    torch.cuda.empty_cache()  # the backend plans with the memory that is free
    return exact


def _packed(body: Any, work: Work, part: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states before the trained tokens of a packed micro-batch, and the tokens.

    All micro-batches have one shape, filled up with a last sample, so that the model is compiled once.
    """
    lengths = [int(work.lengths[i]) for i in part]
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = (positions >= PROMPT).nonzero()[:, 0].cuda()
    rest = max(0, _places["width"] - len(positions))
    ids = F.pad(torch.cat([work.tokens[i] for i in part]).long(), (0, rest))[None].cuda()
    positions = torch.cat([positions, torch.arange(rest)])[None].cuda()
    starts = np.cumsum([0, *lengths, rest])
    starts = np.pad(starts, (0, _places["samples"] + 1 - len(starts)), mode="edge")
    _places["starts"] = torch.tensor(starts, dtype=torch.int32).cuda()
    hidden = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
    return hidden[rows - 1], ids[0][rows]


def _padded(body: Any, work: Work, part: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same of a micro-batch that is padded on the right."""
    width = max(int(work.lengths[i]) for i in part)
    ids = torch.stack([F.pad(work.tokens[i].long(), (0, width - len(work.tokens[i]))) for i in part])
    place = torch.arange(width)
    inside = (place >= PROMPT) & (place < torch.tensor([int(work.lengths[i]) for i in part])[:, None])
    rows, columns = (x.cuda() for x in inside.nonzero(as_tuple=True))
    ids = ids.cuda()
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[rows, columns - 1], ids[rows, columns]


def _score(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")


def _varlen(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **unused: Any
) -> tuple[torch.Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    starts, longest = _places["starts"], _places["longest"]
    out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    return out[None], None
