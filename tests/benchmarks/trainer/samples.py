"""Makes batches of samples with long-tailed lengths: most responses are short, a few very long."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.algorithms.base import Algorithm
from trainer.batch import Batch, StepTotals


@dataclass(frozen=True, slots=True)
class LongTail:
    """Prompts of one length, responses of log-normal lengths."""

    samples: int
    prompt: int
    """Tokens of every prompt."""
    mean: int
    """Tokens of a response, on average."""
    longest: int
    """Tokens of a response, at most."""

    def responses(self, seed: int = 0) -> list[int]:
        """Return the tokens of each response, at least 2; the logarithm's standard deviation is 1."""
        drawn = np.random.default_rng(seed).lognormal(np.log(self.mean) - 0.5, 1.0, self.samples)
        return [int(length) for length in drawn.clip(2, self.longest)]

    def lengths(self, seed: int = 0) -> list[int]:
        """Return the tokens of each sample, prompt and response."""
        return [self.prompt + length for length in self.responses(seed)]


def batch_of(tail: LongTail, algorithm: Algorithm, *, vocabulary: int, seed: int = 0) -> Batch:
    """Return a batch of random tokens, all of the current version, with random advantages."""
    lengths, generator = torch.tensor(tail.lengths(seed)), torch.Generator().manual_seed(seed)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total, samples = int(offsets[-1]), len(lengths)
    position = torch.arange(total) - offsets[:-1].repeat_interleave(lengths)
    sampled = position >= tail.prompt
    advantages = torch.randn(samples, generator=generator).repeat_interleave(lengths)
    return Batch(
        step=0,
        totals=StepTotals(samples, int(sampled.sum()), 0, fresh=True),
        offsets=offsets,
        tokens=torch.randint(vocabulary, (total,), generator=generator, dtype=torch.int32),
        loss_mask=sampled,
        sampled_mask=sampled,
        behaviour_logprobs=torch.where(sampled, -float(np.log(vocabulary)), 0.0),
        versions=torch.where(sampled, 0, -1).int(),
        advantages=advantages * sampled,
        group_index=torch.arange(samples) // 8,
        rewards=torch.randn(samples, generator=generator),
        weights=algorithm.sample_weights(lengths - tail.prompt),
        measured=torch.ones(samples, dtype=torch.bool),
    )


def filled_up(batch: Batch, together: int) -> Batch:
    """Return the batch with every sample as long as the longest of its `together` neighbours.

    What is added is not trained: it only costs, like padding.
    """
    lengths = batch.lengths.tolist()
    widths = [
        max(lengths[first : first + together])
        for first in range(0, len(lengths), together)
        for _ in lengths[first : first + together]
    ]
    offsets = torch.nn.functional.pad(torch.tensor(widths).cumsum(0), (1, 0))
    place = torch.arange(int(batch.offsets[-1])) + (offsets[:-1] - batch.offsets[:-1])[batch.sample_index]

    def spread(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        return torch.full((int(offsets[-1]),), padding, dtype=values.dtype).index_copy(0, place, values)

    return replace(
        batch,
        offsets=offsets,
        tokens=spread(batch.tokens),
        loss_mask=spread(batch.loss_mask),
        sampled_mask=spread(batch.sampled_mask),
        behaviour_logprobs=spread(batch.behaviour_logprobs),
        versions=spread(batch.versions, -1),
        advantages=spread(batch.advantages),
    )


def padded_tokens(micro_batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return the tokens of micro-batches that are padded to the longest sample of each."""
    return sum(len(samples) * max(lengths[sample] for sample in samples) for samples in micro_batches)


def sorted_and_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide samples, sorted by length, into micro-batches of at most `budget` tokens with their padding.

    A longer sample is one of its own; the longest come first.
    """
    result: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if result and (len(result[-1]) + 1) * lengths[result[-1][0]] <= budget:
            result[-1].append(sample)
        else:
            result.append([sample])
    return result
