"""Computes the score of each row of a batch with a value head, at the row's last token.

Shapes: n rows, t tokens of all rows.

A value head maps the hidden state before a token to the value of the state in which the token was sampled.
Appending a token to each row yields the hidden state of the row's last token, from which a sequence
classifier of transformers computes its logit.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.backends.base import FrozenSpec
from trainer.batch import TOKEN_FIELDS, Batch

Evaluate = Callable[[Batch], torch.Tensor]
"""Returns a number for each token of a replica's part, float32 [t] on the CPU. A collective."""


def token_evaluator(spec: FrozenSpec, evaluate: Evaluate) -> Evaluate:
    """Return the function that computes a frozen model's number for each token, given its evaluation."""
    return partial(score_rows, evaluate) if spec.is_classifier else evaluate


def score_rows(values: Evaluate, batch: Batch) -> torch.Tensor:
    """Return the score of each row at its last token, 0 at the others: float32 [t]. A collective.

    Args:
        values: as `Critic.values`.
        batch: a replica's part, on the CPU.
    """
    longer = lengthened(batch)
    scores = torch.zeros(len(batch.tokens))
    scores[batch.offsets[1:] - 1] = values(longer)[longer.offsets[1:] - 1]
    return scores


def lengthened(batch: Batch) -> Batch:
    """Return a batch with one more token per row, the only sampled one; no token is trained."""
    offsets = batch.offsets + torch.arange(len(batch.offsets))
    added = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    added[offsets[1:] - 1] = True
    tokens = torch.zeros(len(added), dtype=batch.tokens.dtype)
    tokens[~added] = batch.tokens
    nothing = torch.zeros(len(added))
    fields: dict[str, Any] = dict.fromkeys(TOKEN_FIELDS)
    fields |= {"tokens": tokens, "sampled_mask": added, "loss_mask": torch.zeros_like(added)}
    fields |= {
        "behaviour_logprobs": nothing,
        "advantages": nothing,
        "versions": tokens.new_full((len(added),), -1),
    }
    return dataclasses.replace(batch, offsets=offsets, **fields)
