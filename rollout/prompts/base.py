"""Defines prompts, the interface of prompt sources, and the order of a prompt stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from protocol.paths import HubPath


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Section `[prompts]`: which prompts are trained on, in which order, and which are held out."""

    source: str = "jsonl"
    """Where prompts come from, a name of `rollout/prompts/registry.py`: jsonl, reasoning_gym or hf."""
    path: HubPath = ""
    """jsonl: a file. hf: a directory made by `save_to_disk`, a Parquet or JSON file, or a directory of
    them."""
    split: str = "train"
    """hf: the split, where the directory has several."""
    prompt_field: str = "prompt"
    """jsonl, hf: field with the question, or with a list of messages `{role, content}`."""
    answer_field: str = "answer"
    """jsonl, hf: field that becomes `answer` in the metadata. Empty: rows have none. All other fields become
    metadata under their own names."""
    families: tuple[str, ...] = ()
    """reasoning_gym: task families, used in turn."""
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    """reasoning_gym: family -> parameters of that family."""
    count: Annotated[int, Meta(ge=0, le=2**30)] = 0
    """Prompts of one pass. 0: all there are; with reasoning_gym, without end."""
    seed: Annotated[int, Meta(ge=0, le=2**30)] = 0
    """Seed of the order, and of what reasoning_gym generates."""
    shuffle: bool = True
    """Use another order in every pass."""
    passes: Annotated[int, Meta(ge=0, le=2**30)] = 0
    """How often the prompts are used. 0: without end."""
    held_out: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Number of prompts, the last ones, that are kept for evaluation and never trained on. With
    `held_out_path`: how many of that file, 0 for all."""
    held_out_path: HubPath = ""
    """jsonl, hf: a file or directory with the prompts for evaluation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the stream."""

    text: str
    """The question, or the content of the last message, as verifiers and people read it."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) if the prompt is a conversation; empty: the prompt is `text`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Data for verifiers and environments; MessagePack types only."""
    index: int = -1
    """Position in the stream; -1 for a held-out prompt."""


class PromptSource(Protocol):
    """A stream of prompts; the same fingerprint and index give the same prompt in every process."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when any prompt or the order of the stream changes."""

    @property
    def size(self) -> int | None:
        """Prompts in the stream, all passes together; None if it is endless."""

    def at(self, index: int) -> Prompt:
        """Return the prompt at a position of the stream.

        Raises:
            IndexError: the stream is shorter.
        """

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts for evaluation, which never occur in the stream."""


class Order:
    """Maps each position of a stream to one of `count` prompts, by a seeded permutation per pass."""

    def __init__(self, count: int, *, seed: int, shuffle: bool, passes: int) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self.size = count * passes if passes else None
        self._permutation = lru_cache(maxsize=4)(self._permuted)

    def __getitem__(self, index: int) -> int:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"prompt {index} is outside the stream of {self.size or 'endlessly many'}")
        number, place = divmod(index, self._count)
        return int(self._permutation(number)[place]) if self._shuffle else place

    def _permuted(self, number: int) -> NDArray[np.int64]:
        """Return the permutation of a pass; by RandomState, whose stream numpy guarantees never to change."""
        seed = xxhash.xxh32_intdigest(f"{self._seed} {number}".encode())
        return np.random.RandomState(seed).permutation(self._count)


def unseen(candidates: Sequence[Prompt], trained: Iterable[str]) -> list[Prompt]:
    """Return the candidates whose text is not in `trained`, each text once, in order."""
    seen = set(trained)
    kept: dict[str, Prompt] = {p.text: p for p in reversed(candidates) if p.text not in seen}
    return [p for p in candidates if kept.get(p.text) is p]


def fingerprint_of(config: PromptConfig, content: bytes) -> str:
    """Return 16 hex digits over the content and every setting that changes the stream.

    The location of the files does not matter.
    """
    settings = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in {"path", "held_out_path", "split"}
    }
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(settings, order="sorted") + b"\0" + content)
