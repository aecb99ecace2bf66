"""Reads the batch of a step from the records of scored groups, a row and a token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.messages import Rollout, ScoredRollout
from tests.trainer.algorithms.naive import mean, of_samples
from trainer.config import AlgorithmConfig

Groups = Sequence[tuple[ScoredRollout, int]]
"""Scored groups, each with the bound of its lease."""


@dataclass
class NaiveBatch:
    """All tokens of a step, one row after the other: what `naive.step_loss` reads of a batch.

    A row is a sample, or a branch of one.
    """

    step: int
    decoupled: bool
    tokens: list[int]
    offsets: list[int]
    """Where each row begins, and the end."""
    rows: torch.Tensor
    """The sample of each row."""
    lengths: torch.Tensor
    sampled_mask: torch.Tensor
    loss_mask: torch.Tensor
    versions: torch.Tensor
    behaviour_logprobs: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    start_logprobs: torch.Tensor | None = None
    """None: those that the loss is computed from."""
    measured: dict[str, float] = field(default_factory=dict)
    """What is reported of the records alone."""

    @property
    def trained(self) -> list[list[int]]:
        """The trained tokens of each row."""
        return self._under(self.loss_mask)

    @property
    def sampled(self) -> list[list[int]]:
        """The sampled tokens of each row."""
        return self._under(self.sampled_mask)

    def _under(self, mask: torch.Tensor) -> list[list[int]]:
        spans = zip(self.offsets, self.offsets[1:], strict=False)
        return [[token for token in range(first, end) if mask[token]] for first, end in spans]


def read(groups: Groups, step: int, config: AlgorithmConfig, *, decoupled: bool) -> NaiveBatch:
    """Return the batch of a step that starts from version `step`."""
    tokens: list[int] = []
    sampled: list[bool] = []
    trained: list[bool] = []
    versions: list[int] = []
    behaviour: list[float] = []
    offsets, rewards, group_index, owners = [0], [], [], []
    left_out = 0
    for index, (scored, bound) in enumerate(groups):
        rollout = scored.rollout
        all_tokens, all_masks = rollout.tokens.numpy().tolist(), rollout.loss_mask.numpy().tolist()
        all_logprobs, spans = rollout.logprobs.numpy().tolist(), rollout.spans.numpy().tolist()
        first, before = 0, max(owners, default=-1) + 1
        rows = rows_of(rollout)
        for row, (sample, context, length) in enumerate(rows):
            tokens += context
            sampled += [False] * len(context)
            trained += [False] * len(context)
            versions += [-1] * len(context)
            behaviour += [0.0] * len(context)
            is_masked = config.truncated == "mask" and rollout.finish_reasons[sample] == "length"
            for place in range(length):
                version = next(v for own, end, v in spans if own == row and place < end)
                is_sampled = all_masks[first + place] == 1
                tokens.append(all_tokens[first + place])
                sampled.append(is_sampled)
                trained.append(is_sampled and step - version <= bound and not is_masked)
                left_out += is_sampled and is_masked
                versions.append(version)
                behaviour.append(all_logprobs[first + place])
            first += length
            offsets.append(len(tokens))
            written = sum(length for other, _, length in rows if other == sample)
            rewards.append(scored.rewards.numpy().tolist()[sample] + punishment(config, written))
            group_index.append(index)
            owners.append(before + sample)
    batch = NaiveBatch(
        step=step,
        decoupled=decoupled,
        tokens=tokens,
        offsets=offsets,
        lengths=torch.tensor(offsets).diff(),
        sampled_mask=torch.tensor(sampled),
        loss_mask=torch.tensor(trained),
        versions=torch.tensor(versions),
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_index=torch.tensor(group_index),
        rows=torch.tensor(owners),
    )
    shaped = mean(of_samples(batch, rewards))  # type: ignore[arg-type]
    measured = {"mask": {"truncated_tokens": left_out}, "shape": {"shaped_reward_mean": shaped}}
    batch.measured = measured.get(config.truncated, {})
    return batch


def rows_of(rollout: Rollout) -> list[tuple[int, list[int], int]]:
    """Return of each row its sample, the tokens that it follows, and how many it has of its own."""
    prompt, tokens = rollout.prompt_tokens.numpy().tolist(), rollout.tokens.numpy().tolist()
    lengths = rollout.lengths.numpy().tolist()
    branches = [[row, -1, 0] for row in range(len(lengths))]
    if rollout.branches is not None:
        branches = rollout.branches.numpy().tolist()
    found: list[tuple[int, list[int], int]] = []
    full: list[list[int]] = []
    first = 0
    for (sample, parent, shared), length in zip(branches, lengths, strict=True):
        context = full[parent][: len(prompt) + shared] if parent >= 0 else prompt
        full.append(context + tokens[first : first + length])
        found.append((sample, context, length))
        first += length
    return found


def punishment(config: AlgorithmConfig, length: int) -> float:
    """DAPO (Yu et al. 2025, eq. 13): what a sample of so many tokens gets beside its reward."""
    before = config.overlong_length - config.overlong_buffer
    if config.truncated != "shape" or length <= before:
        return 0.0
    if length > config.overlong_length:
        return -config.overlong_penalty
    return config.overlong_penalty * (before - length) / config.overlong_buffer
