"""Makes scored groups for tests from samples, packed as a rollout worker would."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from protocol.messages import UNKNOWN_EXPERT, Rollout, ScoredRollout
from protocol.tensors import Array
from trainer.algorithms.base import Algorithm
from trainer.batch import Batch
from trainer.step.plan import StepPlan, plan_step


@dataclass(frozen=True)
class SampleSpec:
    """One sample: its tokens, and the version of each."""

    tokens: Sequence[int]
    versions: Sequence[int]
    reward: float = 0.0
    mask: Sequence[int] | None = None
    """1 for sampled tokens; by default all are."""
    logprobs: Sequence[float] | None = None
    finish: str = "stop"


@dataclass(frozen=True)
class GroupSpec:
    group: int = 0
    prompt: Sequence[int] = (3, 4)
    samples: Sequence[SampleSpec] = field(default_factory=lambda: [SampleSpec([5, 6], [0, 0])])
    generate_s: float = 0.0
    branches: Sequence[tuple[int, int, int]] = ()
    """(sample, parent, shared) of each entry of `samples`, which then are rows. Reward and finish of a sample
    are those of its first row. Empty: each row is a sample."""
    read: tuple[int, int] = (0, 0)
    """`read_tokens` and `cached_tokens`."""
    cancelled: Sequence[int] = ()


def spans_of(samples: Sequence[SampleSpec]) -> list[tuple[int, int, int]]:
    rows = []
    for index, sample in enumerate(samples):
        for position, version in enumerate(sample.versions):
            last = position + 1 == len(sample.versions)
            if last or sample.versions[position + 1] != version:
                rows.append((index, position + 1, version))
    return rows


def scored(spec: GroupSpec, **replaced: Array) -> ScoredRollout:
    """The message of a group; `replaced` puts other arrays in the place of its own."""
    flat = [t for s in spec.samples for t in s.tokens]
    arrays = {
        "prompt_tokens": Array.of(spec.prompt, "int32"),
        "lengths": Array.of([len(s.tokens) for s in spec.samples], "int32"),
        "tokens": Array.of(flat, "int32"),
        "logprobs": Array.of(
            [p for s in spec.samples for p in (s.logprobs or [-1.0] * len(s.tokens))], "float32"
        ),
        "loss_mask": Array.of([m for s in spec.samples for m in (s.mask or [1] * len(s.tokens))], "uint8"),
        "spans": Array.of([row for row in spans_of(spec.samples)] or [[0, 0, 0]][:0], "int32"),
    }
    if not spans_of(spec.samples):
        arrays["spans"] = Array("int32", (0, 3), memoryview(b""))
    firsts = [s for i, s in enumerate(spec.samples) if not spec.branches or spec.branches[i][1] < 0]
    if spec.branches:
        arrays["branches"] = Array.of(spec.branches, "int32")
    rewards = replaced.pop("rewards", Array.of([s.reward for s in firsts], "float32"))
    rollout = Rollout(
        group=spec.group,
        token="lease",
        engine="engine.1",
        finish_reasons=tuple(s.finish for s in firsts),
        responses=("",) * len(firsts),
        generate_s=spec.generate_s,
        read_tokens=spec.read[0],
        cached_tokens=spec.read[1],
        cancelled=Array.of(spec.cancelled, "int32") if spec.cancelled else None,
        **{**arrays, **replaced},
    )
    return ScoredRollout(rollout=rollout, rewards=rewards)


def routed(spec: GroupSpec, *, layers: int = 1) -> ScoredRollout:
    """The group with experts: (token, layer) of the prompt, unknown for the samples' last tokens."""
    tokens = [t for sample in spec.samples for t in sample.tokens]
    ends = np.cumsum([len(sample.tokens) for sample in spec.samples]) - 1
    of_prompt, of_samples = (
        [[[token, layer] for layer in range(layers)] for token in row] for row in (spec.prompt, tokens)
    )
    for end in ends:
        of_samples[end] = [[UNKNOWN_EXPERT] * 2] * layers
    return scored(spec, prompt_experts=Array.of(of_prompt, "uint16"), experts=Array.of(of_samples, "uint16"))


def whole(plan: StepPlan) -> Batch:
    return plan.part(range(len(plan.samples)))


def batch_of(
    groups: Sequence[tuple[ScoredRollout, int]],
    *,
    step: int,
    algorithm: Algorithm,
    temperature: float = 1.0,
    mask_late: bool = True,
) -> Batch:
    """All samples of a step on these groups."""
    return whole(
        plan_step(groups, step=step, algorithm=algorithm, temperature=temperature, mask_late=mask_late)
    )


def by_sample(batch: Batch, values: torch.Tensor) -> list[list[float]]:
    """The entries of an array [t] of a batch, a list for each sample."""
    return [part.tolist() for part in values.split(batch.lengths.tolist())]
