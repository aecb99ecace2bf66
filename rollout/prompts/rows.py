"""Creates an in-memory prompt source from the rows of a file or data set."""

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ProtocolError, SettingsError
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from rollout.prompts.base import Order, Prompt, PromptConfig, fingerprint_of, unseen
from rollout.prompts.conversations import read_conversation


def within_rates(prompts: Sequence[Prompt], config: PromptConfig) -> list[Prompt]:
    """Return the prompts whose pass rate is in the range of `config` or unknown.

    Raises:
        SettingsError: the range is empty, no prompt has a pass rate, or a rate is not a number.
    """
    low, high = config.min_pass_rate, config.max_pass_rate
    if low is not None and high is not None and low > high:
        raise SettingsError(
            f"setting prompts.min_pass_rate: {low:g} is above prompts.max_pass_rate, {high:g}"
        )
    if low is None and high is None and not config.easy_first:
        return list(prompts)
    rates = [pass_rate(prompt, config) for prompt in prompts]
    if all(rate is None for rate in rates):
        raise SettingsError(
            f"{config.path}: no row has a pass rate in the field {config.pass_rate_field!r}; `tether "
            "pass-rates` writes them, or set prompts.pass_rate_field"
        )
    lowest, highest = -math.inf if low is None else low, math.inf if high is None else high
    return [
        prompt
        for prompt, rate in zip(prompts, rates, strict=True)
        if rate is None or lowest <= rate <= highest
    ]


def ease_of(prompts: Sequence[Prompt], config: PromptConfig) -> list[float] | None:
    """Return the ease of each prompt for `Order`; None if `easy_first` is off."""
    if not config.easy_first:
        return None
    rates = [pass_rate(prompt, config) for prompt in prompts]
    return [-math.inf if rate is None else rate for rate in rates]


def pass_rate(prompt: Prompt, config: PromptConfig) -> float | None:
    """Return the pass rate of a prompt; None if unknown.

    Raises:
        SettingsError: the rate is not a finite number.
    """
    value = prompt.metadata.get(config.pass_rate_field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(
            f"prompt {prompt.text[:40]!r}: the field {config.pass_rate_field!r} is {value!r}, not a number"
        )
    return float(value)


TemplateParts = tuple[tuple[str, str], ...]
"""(literal text, following field name or "") for each piece of a template."""


def parse_template(template: str) -> TemplateParts:
    """Parse `prompts.template` into pieces.

    Raises:
        SettingsError: a brace is unbalanced, or braces contain more than a field name.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SettingsError(
            f"setting prompts.template: {error} in {template!r}; write {{{{ and }}}} for braces"
        ) from None
    for _, name, spec, conversion in pieces:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise SettingsError(
                f"setting prompts.template: {{{name}}} is not the name of a field alone in {template!r}; "
                "write {{ and }} for braces"
            )
    return tuple((literal, name or "") for literal, name, _, _ in pieces)


def fill_template(parts: TemplateParts, row: Mapping[str, Any], where: str) -> str:
    """Return the template filled with a row's fields.

    Raises:
        SettingsError: the row lacks a field, or its value is neither text nor a number; the message starts
            with `where`.
    """
    return "".join(literal + (_text(row, name, where) if name else "") for literal, name in parts)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile `prompts.answer_pattern`. Raises SettingsError unless it is valid and has exactly one group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"setting prompts.answer_pattern: {pattern!r}: {error}") from None
    if compiled.groups != 1:
        raise SettingsError(
            f"setting prompts.answer_pattern: {pattern!r} has {compiled.groups} groups; put one pair of "
            "parentheses around the answer, such as '#### (.+)', and write (?: for others"
        )
    return compiled


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        has = ", ".join(sorted(map(str, row))) or "none"
        raise SettingsError(f"{where}: prompts.template names the field {name!r}, which is not one of {has}")
    value = row[name]
    if not isinstance(value, str | int | float):
        raise SettingsError(
            f"{where}: the field {name!r} of prompts.template is {type(value).__name__}; "
            "it must be text or a number"
        )
    return str(value)


class RowSource:
    """Prompt source over rows in memory."""

    def __init__(self, config: PromptConfig, read: Callable[[str, str], list[Prompt]]) -> None:
        """Read the rows, and split them into training and held-out prompts.

        Args:
            config: section `[prompts]`.
            read: returns all prompts of (path, name of the setting `prompts.NAME` that contains the path).

        Raises:
            SettingsError: there are too few prompts, or all held-out prompts also occur in training.
        """
        if config.answer_pattern and not config.answer_field:
            raise SettingsError("setting prompts.answer_pattern: set prompts.answer_field, which it searches")
        prompts = read(config.path, "path")
        own, place = config.held_out_path, config.path or config.source
        available = len(prompts) - (0 if own else config.held_out)
        if available < max(1, config.count):
            raise SettingsError(
                f"{place}: {len(prompts)} prompts leave {max(0, available)} to train on; "
                "lower prompts.held_out or prompts.count, or add data"
            )
        candidates = read(own, "held_out_path")[: config.held_out or None] if own else prompts[available:]
        eligible = within_rates(prompts[:available], config)
        if len(eligible) < max(1, config.count):
            raise SettingsError(
                f"{place}: {len(eligible)} of {available} prompts are within prompts.min_pass_rate and "
                f"max_pass_rate, fewer than {max(1, config.count)}; widen them, or lower prompts.count"
            )
        self._train = eligible[: config.count or None]
        self._held_out = unseen(candidates, (p.question for p in self._train))
        if candidates and not self._held_out:
            raise SettingsError(
                f"{own or place}: all {len(candidates)} held-out prompts also occur in training"
            )
        self._order = Order(
            len(self._train),
            seed=config.seed,
            shuffle=config.shuffle,
            passes=config.passes,
            ease=ease_of(self._train, config),
        )
        self.size = self._order.size
        content = b"\n".join(encoded_prompt(p) for p in (*self._train, *self._held_out))
        if own or len(self._held_out) < len(candidates):  # `prompts.held_out` does not give the split
            content += b"\0%d" % len(self._train)
        self.fingerprint = fingerprint_of(config, content)

    def at(self, index: int) -> Prompt:
        prompt = self._train[self._order[index]]
        return Prompt(prompt.text, prompt.messages, prompt.metadata, index)

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def trained_texts(self) -> Iterable[str]:
        return (prompt.question for prompt in self._train)


def prompts_of(rows: Iterable[tuple[str, Any]], config: PromptConfig) -> list[Prompt]:
    """Return the prompts of rows.

    Args:
        rows: (location for errors, object with the configured fields) pairs.
        config: section `[prompts]`.

    Raises:
        SettingsError: a row is malformed, or answers do not match `answer_pattern`; the message names the
            first such row, and the number of non-matching answers.
    """
    template = parse_template(config.template) if config.template else ()
    pattern = compile_pattern(config.answer_pattern) if config.answer_pattern else None
    prompts: list[Prompt] = []
    unmatched: list[str] = []
    for where, row in rows:
        _check_fields(row, config, where)
        metadata = {str(key): value for key, value in row.items() if template or key != config.prompt_field}
        if config.answer_field:
            metadata["answer"] = row[config.answer_field]
        if pattern is not None:
            match = pattern.search(str(row[config.answer_field]))
            metadata["answer"] = match[1].strip() if match and match[1] else ""
            if not metadata["answer"]:
                unmatched.append(f"{where}: {str(row[config.answer_field])[-80:]!r}")
        question = fill_template(template, row, where) if template else row[config.prompt_field]
        prompts.append(_prompt(question, metadata, where))
    if unmatched:
        raise SettingsError(
            f"{len(unmatched)} of {len(prompts)} rows have no answer that prompts.answer_pattern "
            f"{config.answer_pattern!r} finds; the first is {unmatched[0]}"
        )
    return prompts


def local_path(text: str, name: str) -> Path:
    """Return the path of local data. Raises SettingsError for the setting `prompts.NAME`."""
    path = Path(text)
    if not text or not path.exists():
        raise SettingsError(
            f"setting prompts.{name}: {text!r} does not exist; give local data, or with prompts.source "
            '"hf" a data set of the hub by its name, such as "openai/gsm8k"'
        )
    return path


def _check_fields(row: Any, config: PromptConfig, where: str) -> None:
    names = [config.answer_field] if config.template else [config.prompt_field, config.answer_field]
    if not isinstance(row, Mapping):
        hint = '; a list in one file is read by prompts.source "hf"' if isinstance(row, list) else ""
        raise SettingsError(
            f"{where}: expected an object with the field {names[0]!r}, got {type(row).__name__}{hint}"
        )
    for name in filter(None, names):
        if name in row and row[name] is None:
            raise SettingsError(f"{where}: the field {name!r} is null; take such rows out of the data")
        if name not in row:
            has = ", ".join(sorted(map(str, row))) or "none"
            raise SettingsError(
                f"{where}: no field {name!r}, it has {has}; set prompts.prompt_field or prompts.answer_field"
            )


def _prompt(question: Any, metadata: Mapping[str, Any], where: str) -> Prompt:
    if isinstance(question, str):
        if not question:
            raise SettingsError(f"{where}: the question is empty")
        return Prompt(question, (), metadata)
    messages = read_conversation(question, where)
    return Prompt(messages[-1][1], messages, metadata)


def encoded_prompt(prompt: Prompt) -> bytes:
    """Return a prompt without its index, as MessagePack. Raises SettingsError if it cannot be encoded."""
    try:
        packed = msgspec.msgpack.encode((prompt.text, prompt.messages, prompt.metadata), order="sorted")
        check_shape(packed, max_depth=METADATA_DEPTH + 1)
    except (TypeError, OverflowError, ValueError, RecursionError, ProtocolError) as error:
        raise SettingsError(
            f"prompt {prompt.text[:40]!r} has {_unsendable(prompt)} that cannot be sent: {error}"
        ) from None
    return packed


def _unsendable(prompt: Prompt) -> str:
    """Return the name of the part of a prompt that cannot be encoded."""
    metadata = {f"metadata {key!r}": value for key, value in prompt.metadata.items()}
    for part, value in {"text": prompt.text, "messages": prompt.messages, **metadata}.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, ValueError, RecursionError):
            return part
    return "metadata"
