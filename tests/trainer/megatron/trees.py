"""Makes batches whose samples begin alike, to any depth: prompts of groups, branches of a history."""

import dataclasses

import torch

from tests.trainer.megatron.models import make_batch
from tests.trainer.megatron.routed import routed_batch
from trainer.batch import Batch


def make_tree(name: str, seed: int = 0) -> Batch:
    """`make_batch`, with longer samples of which every one of a group begins as an earlier one.

    The number of tokens is random: prompts, sampled tokens that are trained in both, whole samples.
    """
    return grown(make_batch(name, seed, length=24, prompt=6), seed)


def grown(batch: Batch, seed: int) -> Batch:
    """Have samples begin as earlier ones of their group."""
    generator = torch.Generator().manual_seed(seed + 100)
    tokens, experts = batch.tokens.clone(), None if batch.experts is None else batch.experts.clone()
    offsets, groups = batch.offsets.tolist(), batch.group_index.tolist()
    for sample in range(1, len(groups)):
        mates = [other for other in range(sample) if groups[other] == groups[sample]]
        if not mates:
            continue
        other = mates[int(torch.randint(len(mates), (1,), generator=generator))]
        most = min(offsets[k + 1] - offsets[k] for k in (sample, other))
        shared = int(torch.randint(5, most + 1, (1,), generator=generator))
        for values in (tokens, experts):
            if values is not None:
                values[offsets[sample] : offsets[sample] + shared] = values[
                    offsets[other] : offsets[other] + shared
                ]
    return dataclasses.replace(batch, tokens=tokens, experts=experts)


def routed_tree(name: str) -> Batch:
    """With recorded experts, which are alike where the tokens are, but for one sample."""
    batch = routed_batch(name)
    batch = grown(batch, 0)
    assert batch.experts is not None
    experts = batch.experts.clone()
    experts[batch.offsets[1] + 2] = experts[batch.offsets[1] + 2].roll(1, 0)
    return dataclasses.replace(batch, experts=experts)
