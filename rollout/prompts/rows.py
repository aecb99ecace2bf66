"""Makes a prompt source of the rows of a file or data set, all of them in memory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ProtocolError, SettingsError
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from protocol.ranges import check_ranges
from rollout.prompts.base import Order, Prompt, PromptConfig, fingerprint_of, unseen


class RowSource:
    """Prompt source over rows in memory; files and data sets differ only in how they are read."""

    def __init__(self, config: PromptConfig, read: Callable[[Path], list[Prompt]]) -> None:
        """Read the rows and split them into training and held-out prompts.

        Args:
            config: section `[prompts]`.
            read: returns all prompts at a path.

        Raises:
            SettingsError: there are too few prompts, or all held-out prompts also occur in training.
        """
        check_ranges(config, "prompts")
        prompts = read(_path(config.path, "path"))
        own = config.held_out_path
        available = len(prompts) - (0 if own else config.held_out)
        if available < max(1, config.count):
            raise SettingsError(
                f"{config.path}: {len(prompts)} prompts leave {max(0, available)} to train on; "
                "lower prompts.held_out or prompts.count, or add data"
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

    def trained_texts(self) -> Iterable[str]:
        return (prompt.text for prompt in self._train)


def prompt_of(row: Any, config: PromptConfig, where: str) -> Prompt:
    """Return the prompt of a row.

    Args:
        row: an object with the fields that `config` names.
        config: section `[prompts]`.
        where: file and line, or data set and row, for the error.

    Raises:
        SettingsError: the row is not of that form; names `where`.
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
        raise SettingsError(
            f"prompt {prompt.text[:40]!r} has metadata that cannot be sent: {error}"
        ) from None
    return packed


def _path(text: str, name: str) -> Path:
    path = Path(text)
    if not text or not path.exists():
        raise SettingsError(
            f"setting prompts.{name}: {text!r} does not exist; give local data, nothing is downloaded"
        )
    return path
