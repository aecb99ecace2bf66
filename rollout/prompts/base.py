"""What a prompt is, where prompts come from, and the order in which they are used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from protocol.errors import ProtocolError, SettingsError
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from protocol.ranges import check_ranges


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Section `[prompts]`: which prompts are trained on, in which order, and which are held out."""

    source: str = "jsonl"
    """Where prompts come from, a name of `rollout/prompts/registry.py`: jsonl, reasoning_gym or hf."""
    path: str = ""
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
    held_out_path: str = ""
    """jsonl, hf: a file or directory with the prompts for evaluation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the stream."""

    text: str
    """What verifiers and people read: the question, or the content of the last message."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content), if the prompt is a conversation; empty: `text` is all there is."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For verifiers and environments; MessagePack types only."""
    index: int = -1
    """Position in the stream; -1 for a held-out prompt."""


class PromptSource(Protocol):
    """A stream of prompts. The same fingerprint and index give the same prompt in every process."""

    @property
    def fingerprint(self) -> str:
        """Changes when any prompt or the order of the stream changes."""

    @property
    def size(self) -> int | None:
        """Prompts in the whole stream, all passes together; None if it never ends."""

    def at(self, index: int) -> Prompt:
        """The prompt at a position of the stream.

        Raises:
            IndexError: if the stream is shorter.
        """

    def held_out(self) -> Sequence[Prompt]:
        """The prompts that the stream never holds, for evaluation."""


class Order:
    """Which of `count` prompts stands at each position of a stream of `passes` passes: a seeded permutation
    for each pass."""

    def __init__(self, count: int, *, seed: int, shuffle: bool, passes: int) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self.size = count * passes if passes else None
        self._permutation = lru_cache(maxsize=4)(self._permuted)

    def __getitem__(self, index: int) -> int:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(
                f"prompt {index} is outside the stream of {self.size if self.size is not None else 'endlessly many'}"
            )
        number, place = divmod(index, self._count)
        return int(self._permutation(number)[place]) if self._shuffle else place

    def _permuted(self, number: int) -> NDArray[np.int64]:
        """RandomState, because numpy promises that its stream never changes."""
        seed = xxhash.xxh32_intdigest(f"{self._seed} {number}".encode())
        return np.random.RandomState(seed).permutation(self._count)


class RowSource:
    """A prompt source over rows that are all in memory; files and data sets differ only in how they are
    read."""

    def __init__(self, config: PromptConfig, read: Callable[[Path], list[Prompt]]) -> None:
        """Read and divide the rows.

        Args:
            config: the section.
            read: all prompts at a path.

        Raises:
            SettingsError: if there are too few, or none is held out that does not occur in training.
        """
        check_ranges(config, "prompts")
        prompts = read(_path(config.path, "path"))
        own = config.held_out_path
        available = len(prompts) - (0 if own else config.held_out)
        if available < max(1, config.count):
            raise SettingsError(
                f"{config.path}: {len(prompts)} prompts leave {max(0, available)} to train on; "
                f"lower prompts.held_out or prompts.count, or add data"
            )
        candidates = (
            read(_path(own, "held_out_path"))[: config.held_out or None] if own else prompts[available:]
        )
        self._train = prompts[: config.count or available]
        self._held_out = unseen(candidates, (p.text for p in self._train))
        if candidates and not self._held_out:
            raise SettingsError(
                f"{own or config.path}: all {len(candidates)} held-out prompts also occur in training"
            )
        self._order = Order(len(self._train), seed=config.seed, shuffle=config.shuffle, passes=config.passes)
        self.fingerprint = fingerprint_of(
            config, b"\n".join(_encoded(p) for p in (*self._train, *self._held_out))
        )

    @property
    def size(self) -> int | None:
        return self._order.size

    def at(self, index: int) -> Prompt:
        prompt = self._train[self._order[index]]
        return Prompt(prompt.text, prompt.messages, prompt.metadata, index)

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out


def _path(text: str, name: str) -> Path:
    path = Path(text)
    if not text or not path.exists():
        raise SettingsError(
            f"setting prompts.{name}: {text!r} does not exist; give local data, nothing is downloaded"
        )
    return path


def unseen(candidates: Sequence[Prompt], trained: Iterable[str]) -> list[Prompt]:
    """Those of `candidates` whose text is not among the texts `trained`, each text once, in order."""
    seen = set(trained)
    kept: dict[str, Prompt] = {p.text: p for p in reversed(candidates) if p.text not in seen}
    return [p for p in candidates if kept.get(p.text) is p]


def fingerprint_of(config: PromptConfig, content: bytes) -> str:
    """16 hex digits over the content and every setting that changes the stream; where the files lie does not
    count."""
    settings = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in {"path", "held_out_path", "split"}
    }
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(settings, order="sorted") + b"\0" + content)


def prompt_of(row: Any, config: PromptConfig, where: str) -> Prompt:
    """The prompt in a row of a data set.

    Raises:
        SettingsError: naming `where` and what is wrong with the row.
    """
    if not isinstance(row, Mapping):
        raise SettingsError(
            f"{where}: expected an object with the field {config.prompt_field!r}, got {type(row).__name__}"
        )
    for name in filter(None, (config.prompt_field, config.answer_field)):
        if row.get(name) is None:
            has = ", ".join(sorted(map(str, row))) or "none"
            raise SettingsError(
                f"{where}: no field {name!r}, it has {has}; set prompts.prompt_field or prompts.answer_field"
            )
    question = row[config.prompt_field]
    metadata = {str(key): value for key, value in row.items() if key != config.prompt_field}
    if config.answer_field:
        metadata["answer"] = row[config.answer_field]
    if isinstance(question, str):
        if not question:
            raise SettingsError(f"{where}: the field {config.prompt_field!r} is empty")
        return Prompt(question, (), metadata)
    messages = _messages(question, where)
    return Prompt(messages[-1][1], messages, metadata)


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    wanted = f"{where}: expected text or a list of messages with a role and a content as text"
    if not isinstance(value, list) or not value:
        raise SettingsError(f"{wanted}, got {type(value).__name__}")
    found = []
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise SettingsError(f"{wanted}, got {str(message)[:80]}")
        found.append((message["role"], message["content"]))
    return tuple(found)


def _encoded(prompt: Prompt) -> bytes:
    try:
        packed = msgspec.msgpack.encode((prompt.text, prompt.messages, prompt.metadata), order="sorted")
        check_shape(packed, most_depth=METADATA_DEPTH + 1)
    except (TypeError, OverflowError, ValueError, RecursionError, ProtocolError) as error:
        raise SettingsError(f"prompt {prompt.text[:40]!r} has metadata that cannot travel: {error}") from None
    return packed
