"""Counts the tokens that the passes of a step computed."""

import dataclasses
from typing import NamedTuple

import torch

from trainer.backends.base import StepStats


class MadePasses(NamedTuple):
    """Result of a step's passes; equal on every rank. Tokens are inputs of all replicas."""

    vector: torch.Tensor
    """Measurements of the whole step."""
    micro_batches: int
    """Forward passes of the busiest replica."""
    tokens: int
    """Tokens that were computed, with padding."""
    padding: int
    """Tokens of them that are no sample's."""
    row_tokens: int
    """Tokens of all samples, those that were computed once counted for each."""

    @property
    def padding_share(self) -> float:
        """Share of padding in the tokens that were computed."""
        return self.padding / self.tokens if self.tokens else 0.0

    @property
    def shared_share(self) -> float:
        """Share of the samples' tokens that another sample's computation stood for."""
        return 1 - (self.tokens - self.padding) / self.row_tokens if self.row_tokens else 0.0

    def counted_in(self, stats: StepStats) -> StepStats:
        """Return a step's statistics with these counts."""
        return dataclasses.replace(
            stats,
            micro_batches=self.micro_batches,
            padding_share=self.padding_share,
            shared_share=self.shared_share,
            computed_tokens=self.tokens - self.padding,
        )
