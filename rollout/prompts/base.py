"""Defines prompts, the interface of prompt sources, and the order of a prompt stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import xxhash
from annotated_types import Interval
from numpy.typing import NDArray

from protocol.paths import HubPath, set_first
from rollout.prompts.named_source import PLACE, MixtureConfig, SourceConfig, unused_by

NOT_IN_FINGERPRINT = frozenset(
    {
        "path",
        "held_out_path",
        "subset",
        "split",
        "revision",
        "template",
        "answer_pattern",
        "mixture",
        "options",
        "min_pass_rate",
        "max_pass_rate",
    }
)
"""Settings of `[prompts]` that say where prompts are and how they are read: the prompts themselves count."""
NOT_IN_FINGERPRINT_BY_DEFAULT = frozenset({"pass_rate_field", "easy_first"})
"""Settings that the fingerprint covers unless they have their default: it was made without them before."""


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Section `[prompts]`: which prompts are trained on, in which order, and which are held out."""

    source: str = set_first("jsonl")
    """Where prompts come from, a name of `rollout/prompts/registry.py`: jsonl, hf, reasoning_gym or
    textarena; or `MODULE:NAME`, a source of your own (docs/own_code.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own source."""
    path: HubPath = set_first("")
    """jsonl: a file. hf: the name of a data set on the Hugging Face hub, such as "openai/gsm8k", a directory
    of the same form, one made by `save_to_disk`, or a Parquet or JSON file."""
    subset: str = ""
    """hf: the subset (configuration), where the data set has several, such as "main"."""
    split: str = "train"
    """hf: the split, where the data set has several."""
    revision: str = ""
    """hf: branch, tag or commit on the hub. Empty: main. The commit of the first start is recorded and
    kept."""
    prompt_field: str = set_first("prompt")
    """jsonl, hf: field with the question, or with a list of messages `{role, content}`."""
    answer_field: str = "answer"
    """jsonl, hf: field that becomes `answer` in the metadata. Empty: rows have none. All other fields become
    metadata under their own names."""
    template: str = ""
    """jsonl, hf: text with fields of the row in braces, such as "Question: {question}", which becomes the
    question; `prompt_field` is not used then. `{{` and `}}` are braces."""
    answer_pattern: str = ""
    """jsonl, hf: regular expression with one group, such as `#### (.+)`; the group's match in the answer
    field is the answer. Each row has to match."""
    families: tuple[str, ...] = ()
    """reasoning_gym: task families, used in turn; textarena: games."""
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    """reasoning_gym, textarena: family or game -> its parameters."""
    count: Annotated[int, Interval(ge=0, le=2**30)] = 0
    """Prompts of one pass. 0: all there are; with reasoning_gym and textarena, without end."""
    seed: Annotated[int, Interval(ge=0, le=2**30)] = 0
    """Seed of the order, and of what reasoning_gym and textarena generate."""
    shuffle: bool = True
    """Use another order in every pass."""
    pass_rate_field: str = "pass_rate"
    """jsonl, hf: field with the pass rate, the mean reward that a model had for the prompt; `tether
    pass-rates` writes it. Rows whose rate is unknown may lack it."""
    min_pass_rate: Annotated[float | None, Interval(ge=-1e6, le=1e6)] = None
    """jsonl, hf: train only on prompts with at least this pass rate, and on those whose rate is unknown."""
    max_pass_rate: Annotated[float | None, Interval(ge=-1e6, le=1e6)] = None
    """jsonl, hf: train only on prompts with at most this pass rate, and on those whose rate is unknown."""
    easy_first: bool = False
    """jsonl, hf: order each pass by pass rate, the highest first; those whose rate is unknown come last."""
    passes: Annotated[int, Interval(ge=0, le=2**30)] = 0
    """How often the prompts are used. 0: without end."""
    held_out: Annotated[int, Interval(ge=0, le=2**20)] = set_first(0)
    """Number of prompts, the last ones, that are kept for evaluation and never trained on. With
    `held_out_path`: how many of that file, 0 for all."""
    held_out_path: HubPath = set_first("")
    """jsonl, hf: a file or directory with the prompts for evaluation."""
    mixture: tuple[MixtureConfig, ...] = ()
    """Several sources with weights, instead of one."""


DEFAULTS: Mapping[str, Any] = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(PromptConfig)
}
"""Setting of `[prompts]` -> its default."""


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

    @property
    def question(self) -> str:
        """All that was said, without system messages: by it a prompt is known to repeat another."""
        said = [content for role, content in self.messages if role != "system"]
        return "\n\n".join(said) or self.text


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

    def trained_texts(self) -> Iterable[str]:
        """Yield the question of every prompt of one pass; of none where prompts are generated without end."""


class Order:
    """Maps each position of a stream to one of `count` prompts, by a seeded permutation per pass.

    With `ease`, a number for each prompt, a pass begins with the largest; those with equal numbers are in the
    order of the permutation.
    """

    def __init__(
        self, count: int, *, seed: int, shuffle: bool, passes: int, ease: Sequence[float] | None = None
    ) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._ease = None if ease is None else np.array(ease, dtype=np.float64)
        self.size = count * passes if passes else None
        self._permutation = lru_cache(maxsize=4)(self._permuted)

    def __getitem__(self, index: int) -> int:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"prompt {index} is outside the stream of {self.size or 'endlessly many'}")
        number, place = divmod(index, self._count)
        return int(self._permutation(number)[place]) if self._shuffle or self._ease is not None else place

    def _permuted(self, number: int) -> NDArray[np.int64]:
        """Return the permutation of a pass; by RandomState, whose stream numpy guarantees never to change."""
        order = np.arange(self._count)
        if self._shuffle:
            seed = xxhash.xxh32_intdigest(f"{self._seed} {number}".encode())
            order = np.random.RandomState(seed).permutation(self._count)
        return order if self._ease is None else order[np.argsort(-self._ease[order], kind="stable")]


class GeneratedOrder:
    """Maps each position of a stream that is generated to a number of an item; endless if `count` is 0."""

    def __init__(self, config: PromptConfig, most: int) -> None:
        """Args: config: says how many items, in which order; most: positions are below it."""
        self._most = most
        self._order = (
            Order(config.count, seed=config.seed, shuffle=config.shuffle, passes=config.passes)
            if config.count
            else None
        )
        self.size = self._order.size if self._order else None

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._most:
            raise IndexError(f"prompt {index} is outside the stream of {self.size or self._most}")
        return self._order[index] if self._order else index


def source_settings(prompts: PromptConfig, own: SourceConfig) -> PromptConfig:
    """Return the settings of a named source: its own, and for absent ones `[prompts]`'s.

    With a path of its own it takes neither subset, split nor revision from there. A setting that its kind of
    source does not use is taken only where the fingerprint covers it.
    """
    place = () if own.path is None else PLACE
    unused = {*unused_by(own.source or prompts.source)}
    left_out = {*place, *unused & (NOT_IN_FINGERPRINT | NOT_IN_FINGERPRINT_BY_DEFAULT)}
    prompts = replace(prompts, **{name: DEFAULTS[name] for name in left_out})
    values = {
        field.name: value
        for field in fields(own)
        if field.name in DEFAULTS and (value := getattr(own, field.name)) is not None
    }
    return replace(prompts, mixture=(), **values)


def unseen(candidates: Sequence[Prompt], trained: Iterable[str]) -> list[Prompt]:
    """Return the candidates whose question is not in `trained`, each question once, in order."""
    seen = set(trained)
    kept: dict[str, Prompt] = {p.question: p for p in reversed(candidates) if p.question not in seen}
    return [p for p in candidates if kept.get(p.question) is p]


def fingerprint_of(config: PromptConfig, content: bytes) -> str:
    """Return 16 hex digits over the content and every setting that changes the stream.

    The location of the files does not matter, nor how they are read.
    """
    settings = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in NOT_IN_FINGERPRINT
        and not (name in NOT_IN_FINGERPRINT_BY_DEFAULT and value == DEFAULTS[name])
    }
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(settings, order="sorted") + b"\0" + content)
