"""Makes batches of samples: with long-tailed lengths, of groups with one prompt, of an agent's branches."""

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
    """Return a batch of random tokens, all of the current version, with random advantages.

    Token 0 is not among them: it is the padding, which Hugging Face does not train.
    """
    lengths, generator = tail.lengths(seed), torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocabulary, (sum(lengths),), generator=generator)
    masks = [torch.arange(length) >= tail.prompt for length in lengths]
    return _batch(tokens.split(lengths), masks, 8, algorithm, vocabulary)


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups whose samples have one prompt, and responses of one length."""

    prompt: int
    response: int
    """Tokens of each."""
    samples: int
    """Samples of a group."""
    groups: int

    def batch(self, algorithm: Algorithm, *, vocabulary: int) -> Batch:
        """Return a batch of random tokens."""
        length, generator = self.prompt + self.response, torch.Generator().manual_seed(0)
        tokens = torch.randint(1, vocabulary, (self.groups, self.samples, length), generator=generator)
        tokens[:, :, : self.prompt] = tokens[:, :1, : self.prompt]
        sampled = torch.arange(length).expand_as(tokens) >= self.prompt
        rows = [row for group in tokens for row in group]
        return _batch(
            rows, [mask for group in sampled for mask in group], self.samples, algorithm, vocabulary
        )

    def __str__(self) -> str:
        return f"{self.prompt}/{self.response} x {self.samples}"


@dataclass(frozen=True, slots=True)
class Branches:
    """Runs of an agent, each a sample of some branches, which leave the one before at a random turn."""

    prompt: int
    turn: int
    """Tokens of a turn, of which the model samples the second half."""
    turns: int
    branches: int
    groups: int

    def batch(self, algorithm: Algorithm, *, vocabulary: int) -> Batch:
        """Return a batch of random tokens, each of which is trained in the first branch that has it."""
        length, generator = self.prompt + self.turns * self.turn, torch.Generator().manual_seed(0)
        in_turn = torch.arange(length) - self.prompt
        may_train = (in_turn >= 0) & (in_turn % self.turn >= self.turn // 2)
        rows, masks = [], []
        for _ in range(self.groups):
            row, left = torch.randint(1, vocabulary, (length,), generator=generator), 0
            for branch in range(self.branches):
                if branch:
                    turn = int(torch.randint(self.turns // 2, self.turns, (1,), generator=generator))
                    left = self.prompt + turn * self.turn
                    rest = torch.randint(1, vocabulary, (length - left,), generator=generator)
                    row = torch.cat([row[:left], rest])
                rows.append(row)
                masks.append(may_train & (torch.arange(length) >= left))
        return _batch(rows, masks, self.branches, algorithm, vocabulary)

    def __str__(self) -> str:
        return f"{self.branches} branches of {self.turns} turns"


def _batch(
    rows: Sequence[torch.Tensor],
    sampled: Sequence[torch.Tensor],
    together: int,
    algorithm: Algorithm,
    vocabulary: int,
) -> Batch:
    """Return a batch of samples, of which `together` are a group."""
    lengths, generator = torch.tensor([len(row) for row in rows]), torch.Generator().manual_seed(1)
    mask = torch.cat(list(sampled))
    advantages = torch.randn(len(rows), generator=generator).repeat_interleave(lengths)
    return Batch(
        step=0,
        totals=StepTotals(len(rows), int(mask.sum()), 0, fresh=True),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        tokens=torch.cat(list(rows)).int(),
        loss_mask=mask,
        sampled_mask=mask,
        behaviour_logprobs=torch.where(mask, -float(np.log(vocabulary)), 0.0),
        versions=torch.where(mask, 0, -1).int(),
        advantages=advantages * mask,
        group_index=torch.arange(len(rows)) // together,
        rewards=torch.randn(len(rows), generator=generator),
        weights=algorithm.sample_weights(torch.stack([one.sum() for one in sampled])),
        measured=torch.ones(len(rows), dtype=torch.bool),
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
