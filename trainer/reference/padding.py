"""Packs samples into padded micro-batches."""

import torch

from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.data.packing import pack_padded

AUTO_TOKENS = 4096
"""Tokens of a forward pass, padding included, where `trainer.micro_batch_tokens` is 0."""


def passes(batch: Batch, trainer: TrainerConfig) -> list[torch.Tensor]:
    """Return the samples of each micro-batch, int64 [n], ascending."""
    budget = trainer.micro_batch_tokens or AUTO_TOKENS
    packed = pack_padded(batch.lengths.tolist(), budget, trainer.micro_batch_size)
    return [torch.tensor(sorted(samples)) for samples in packed]


def padded(part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of a micro-batch, int64 [n, L], and row and column of each, both int64 [t].

    Samples are padded on the right, which causal attention never reads: no mask is needed.
    """
    sample, lengths = part.sample_index, part.lengths
    position = torch.arange(len(sample), device=sample.device) - part.offsets[sample]
    tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64, device=sample.device)
    tokens[sample, position] = part.tokens.long()
    return tokens, sample, position
