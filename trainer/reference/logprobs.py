"""Computes per-token values, such as log-probabilities, with transformers models on padded samples.

Shapes: k requested tokens of a pass.
"""

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.data.packing import pack_padded
from trainer.functional.logprobs import token_logprobs

M = TypeVar("M", bound=torch.nn.Module)
AUTO_TOKENS = 4096
"""Tokens per forward pass, including padding, if `trainer.micro_batch_tokens` is 0."""


def passes(batch: Batch, trainer: TrainerConfig) -> list[torch.Tensor]:
    """Return the samples of each micro-batch, int64 [n], ascending."""
    budget = trainer.micro_batch_tokens or AUTO_TOKENS
    packed = pack_padded(batch.lengths.tolist(), budget, trainer.micro_batch_size)
    return [torch.tensor(sorted(samples)) for samples in packed]


def padded(part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of a micro-batch, int64 [n, L], and row and column of each token, both int64 [t].

    Samples are right-padded. Causal attention never reads the padding, so no mask is needed.
    """
    sample, lengths = part.sample_index, part.lengths
    position = torch.arange(len(sample), device=sample.device) - part.offsets[sample]
    tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64, device=sample.device)
    tokens[sample, position] = part.tokens.long()
    return tokens, sample, position


def forward(model: torch.nn.Module, part: Batch, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropy of the tokens at `place` (int64 [k]) of a micro-batch, both [k].

    The micro-batch must be on the model's device.
    """
    tokens, sample, position = padded(part)
    before = position[place] - 1
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    asked = before.unique() if selects else torch.arange(tokens.shape[1], device=tokens.device)
    options = {"logits_to_keep": asked} if selects else {}
    logits = model(input_ids=tokens, use_cache=False, **options).logits
    rows = logits[sample[place], torch.searchsorted(asked, before)]
    return token_logprobs(rows, part.tokens[place].long(), part.temperature)


def logprobs_at(model: torch.nn.Module, part: Batch, place: torch.Tensor) -> torch.Tensor:
    """Return only the log-probabilities of `forward`."""
    return forward(model, part, place)[0]


@torch.no_grad()
def evaluate(
    compute: Callable[[M, Batch, torch.Tensor], torch.Tensor], model: M, batch: Batch, trainer: TrainerConfig
) -> torch.Tensor:
    """Return a value per sampled token of a batch, 0 for other tokens: float32 [t], on the CPU.

    Args:
        compute: (model, micro-batch on the model's device, indices of k tokens) -> values [k], like
            `logprobs_at`.
        model: model to evaluate.
        batch: any samples.
        trainer: limits of a pass.
    """
    device = next(model.parameters()).device
    out = torch.zeros(len(batch.tokens))
    for samples in passes(batch, trainer):
        part = batch.select(samples).to(device)
        found = compute(model, part, part.sampled_mask.nonzero()[:, 0])
        out[batch.sampled_mask & torch.isin(batch.sample_index, samples)] = found.cpu()
    return out
