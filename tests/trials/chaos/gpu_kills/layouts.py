"""Names where trainer and engine run, and which of their processes is killed at which moment."""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.settings.sections import Settings


class Part(StrEnum):
    """Kinds of processes that are killed."""

    TRAINER = "trainer rank"
    RANK = "engine rank"
    CORE = "engine core"
    WORKER = "rollout worker"


class Moment(StrEnum):
    """What is heard of the version whose transfer is cut."""

    DRAFT = "draft"
    """The trainer begins to export it, and engines to receive it: before the commit."""
    MANIFEST = "manifest"
    """It is committed, and engines begin to stage it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One process."""

    part: Part
    rank: int = 0
    """Number of the rank, of the trainer or of the engine; 0 for what has no ranks."""

    @property
    def label(self) -> str:
        return f"{self.part} {self.rank}" if self.part in (Part.TRAINER, Part.RANK) else str(self.part)

    def missing_in(self, settings: Settings) -> str:
        """Return why a run with these settings has no such process; empty if it has."""
        ranks = settings.parallel.world_size if self.part is Part.TRAINER else 1
        if self.part in (Part.RANK, Part.CORE) and settings.engine.name != "vllm":
            return f"the engine {settings.engine.name} is in the rollout worker's process"
        if self.part is Part.RANK:
            ranks = settings.engine.tensor_parallel_size
            if ranks == 1:
                return "an engine of one rank has no process for it"
        return f"there are {ranks} ranks" if self.rank >= ranks else ""


@dataclass(frozen=True, slots=True)
class Layout:
    """One run."""

    name: str
    about: str
    overrides: tuple[str, ...]
    """Settings on two GPUs."""
    tiny: tuple[str, ...]
    """Settings of its rehearsal on a CPU, after those of `TINY`."""
    kills: tuple[tuple[Target, Moment], ...]


TINY = (
    'model.scratch={architecture="qwen2", vocabulary="0123456789= ", max_position_embeddings=64}',
    "sampling.max_tokens=8", "sampling.samples_per_prompt=4", "engine.name=hf", "engine.max_model_len=64",
    "engine.kv_cache_mb=64", "trainer.micro_batch_tokens=4096", "bound.groups_per_step=4",
    "rollout.groups_in_flight=8",
)  # fmt: skip
"""Settings of every rehearsal."""

LAYOUTS = (
    Layout(
        "A",
        "trainer of TP 2 and engine of TP 2, both on GPUs 0 and 1, ipc",
        (
            'services.trainer_gpus="0,1"', 'services.rollout_gpus="0,1"', "weights.transport=ipc",
            "parallel.tensor_model_parallel_size=2", "engine.tensor_parallel_size=2",
        ),
        ("weights.transport=shm", "parallel.tensor_model_parallel_size=2"),
        (
            (Target(Part.TRAINER, 1), Moment.MANIFEST),
            (Target(Part.RANK, 1), Moment.MANIFEST),
            (Target(Part.TRAINER, 0), Moment.MANIFEST),
            (Target(Part.CORE), Moment.MANIFEST),
        ),
    ),
    Layout(
        "B",
        "trainer on GPU 0, engine on GPU 1, nccl",
        ('services.trainer_gpus="0"', 'services.rollout_gpus="1"', "weights.transport=nccl"),
        ("weights.transport=nccl",),
        (
            (Target(Part.TRAINER), Moment.DRAFT),
            (Target(Part.CORE), Moment.DRAFT),
            (Target(Part.WORKER), Moment.DRAFT),
        ),
    ),
)  # fmt: skip


def layout_named(name: str, only: str = "") -> Layout:
    """Return a layout, with the kills of `only`: labels, separated by commas; empty: all.

    Raises:
        ValueError: there is none of that name.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            labels = only.split(",") if only else [target.label for target, _ in layout.kills]
            return replace(layout, kills=tuple(kill for kill in layout.kills if kill[0].label in labels))
    raise ValueError(f"layout {name!r}: choose from {', '.join(layout.name for layout in LAYOUTS)}")
