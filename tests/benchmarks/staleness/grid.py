"""Lists what the staleness benchmark compares: a run for each task, correction, bound and seed."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.versions import ROOT

BOUNDS = (0, 1, 2, 4, 8)
SEED_SETTINGS = ("trainer.seed", "prompts.seed")


@dataclass(frozen=True, slots=True)
class Task:
    """What is learnt, and how a run of it is made."""

    config: str
    """Settings file, relative to the repository."""
    steps: int
    every: int
    """Steps between two versions that are scored on held-out prompts; 0: none is, the training reward is
    all there is."""
    threshold: float
    """Score whose samples and seconds are reported."""
    corrections: tuple[str, ...]
    settings: tuple[str, ...] = ()
    seed_settings: tuple[str, ...] = SEED_SETTINGS


CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("trainer.recompute_logprobs=true", "algorithm.importance_cap=0"),
    "clip": ("trainer.recompute_logprobs=false",),
    "truncated": ("trainer.recompute_logprobs=true", "algorithm.importance_cap=2"),
    "truncated-sequence": (
        "trainer.recompute_logprobs=true",
        "algorithm.importance_cap=2",
        "algorithm.importance_level=sequence",
    ),
    "masked-token": (
        "trainer.recompute_logprobs=true",
        "algorithm.importance_cap=2",
        "algorithm.rejection_level=token",
    ),
    "masked-sequence": (
        "trainer.recompute_logprobs=true",
        "algorithm.importance_cap=2",
        "algorithm.importance_level=sequence",
        "algorithm.rejection_level=sequence",
    ),
    "masked-geometric": (
        "trainer.recompute_logprobs=true",
        "algorithm.importance_cap=2",
        "algorithm.rejection_level=geometric",
    ),
    "interpolated": (
        "trainer.recompute_logprobs=true",
        "algorithm.importance_cap=2",
        "algorithm.proximal_policy=interpolated",
    ),
    "m2po": (
        "algorithm.name=m2po",
        "algorithm.second_moment_threshold=0.04",
        "algorithm.clip_low=0.3",
        "algorithm.clip_high=0.5",
    ),
    "clip-ess": ("algorithm.ess_scaling=sqrt",),
}
"""Correction -> its settings.

`none` trains stale tokens as if they were fresh; `clip` clips the ratio to the engine's policy; the others
have the decoupled objective with recomputed log-probabilities, whose weight is truncated or, outside of a
half to two, masked. `m2po` clips by the second moment of log ratios; `clip-ess` makes smaller steps the
more the weights differ.
"""
LEVEL_FREE = ("none", "clip", "truncated", "masked-token", "m2po")
"""Corrections that differ where a sample is a single token."""
ON_CPU = (
    "engine.name=hf",
    "trainer.backend=reference",
    "trainer.threads=1",
    "engine.threads=1",
    "trainer.micro_batch_size=16",
    "bound.groups_per_step=16",
    "rollout.groups_in_flight=64",
    "prompts.held_out=200",
)
"""A small micro-batch makes the trainer the slower side, so that lags come up to the bound."""
WITH_MODEL = (*SEED_SETTINGS, "model.scratch.seed")

TASKS: dict[str, Task] = {
    "max3": Task(
        config="deploy/configs/demo.toml",
        steps=60,
        every=3,
        threshold=0.8,
        corrections=LEVEL_FREE,
        settings=ON_CPU,
        seed_settings=WITH_MODEL,
    ),
    "sort3": Task(
        config="deploy/configs/demo.toml",
        steps=160,
        every=8,
        threshold=0.3,
        corrections=tuple(CORRECTIONS),
        settings=(
            *ON_CPU,
            f"prompts.path={ROOT / 'deploy/examples/sort3/prompts.jsonl'}",
            "sampling.max_tokens=3",
            'reward.verifiers=[{name="positions"}]',
        ),
        seed_settings=WITH_MODEL,
    ),
    "smollm2": Task(
        config="deploy/examples/smollm2/config.toml",
        steps=60,
        every=0,
        threshold=0.4,
        corrections=("clip", "clip-ess", "truncated", "masked-geometric"),
        settings=(
            "engine.memory_fraction=0.08",
            "weights.transport=ipc",
            "rollout.groups_in_flight=64",
            "trainer.checkpoint_every=1000",
            "eval.at_end=false",
        ),
    ),
}
"""Task -> its runs. smollm2 needs a GPU, which trainer and engine share (several runs fit on one), and its
prompts and model: deploy/examples/smollm2/prepare.py."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run."""

    task: str
    correction: str
    bound: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.correction}/e{self.bound}_seed{self.seed}"

    def overrides(self, steps: int) -> list[str]:
        """Return its settings over those of the file, as `--set` takes them."""
        task = TASKS[self.task]
        return [
            *task.settings,
            *CORRECTIONS[self.correction],
            *(f"{name}={self.seed}" for name in task.seed_settings),
            f"bound.max_staleness={self.bound}",
            f"trainer.checkpoint_every={task.every or steps}",
            "trainer.keep_checkpoints=100000",
            "monitor.enabled=false",
            "eval.at_end=false",
            "run.name=staleness",
        ]


def cells(
    tasks: Sequence[str], corrections: Sequence[str], bounds: Sequence[int], seeds: Sequence[int]
) -> list[Cell]:
    """Return all runs, seed by seed, so that a part of them already compares everything.

    Args:
        corrections: of these, each task has those that it lists.
    """
    return [
        Cell(task, correction, bound, seed)
        for seed in seeds
        for task in tasks
        for correction in corrections
        if correction in TASKS[task].corrections
        for bound in bounds
    ]
