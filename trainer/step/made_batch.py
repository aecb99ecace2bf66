"""Makes scored groups without a model, to try an algorithm on."""

import numpy as np

from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array

GROUPS = 3
"""Groups of a made batch; all rewards of the last one are equal."""
LONGEST = 12
"""Tokens of a completion, at most."""
SEED = 28


def made_groups(samples: int) -> list[ScoredRollout]:
    """Return groups of `samples` completions each, of versions 0 and 1, always the same."""
    draw = np.random.RandomState(SEED)
    return [_group(number, samples, draw) for number in range(GROUPS)]


def _group(number: int, samples: int, draw: np.random.RandomState) -> ScoredRollout:
    lengths = draw.randint(2, LONGEST + 1, samples)
    total = int(lengths.sum())
    rewards = draw.rand(samples) if number + 1 < GROUPS else np.ones(samples)
    spans = [row for i, n in enumerate(lengths.tolist()) for row in ((i, 1, 0), (i, n, 1))]
    rollout = Rollout(
        group=number,
        token="made",
        engine="made",
        prompt_tokens=Array.of([3, 4, 5], "int32"),
        lengths=Array.of(lengths, "int32"),
        tokens=Array.of(draw.randint(3, 100, total), "int32"),
        logprobs=Array.of(-draw.rand(total) - 0.01, "float32"),
        loss_mask=Array.of(np.ones(total), "uint8"),
        spans=Array.of(spans, "int32"),
        finish_reasons=("stop",) * samples,
        responses=("",) * samples,
    )
    return ScoredRollout(rollout=rollout, rewards=Array.of(rewards, "float32"))
