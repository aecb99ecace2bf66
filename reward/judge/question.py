"""Builds the messages for a judge, from a template or with a user's function."""

import string
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from protocol.errors import RewardError, SettingsError
from reward.function_arguments import UserCode, load_user_code
from reward.group import ResponseGroup
from reward.judge.config import WHAT, Options
from reward.verifiers.registry import required

GROUP_PLACEHOLDERS = {"prompt", "response", "responses"}
"""Template placeholders that are not metadata fields."""
Messages = Sequence[Mapping[str, Any]]


class Question(Protocol):
    """Builder of the messages for one sample, or for all samples of a group."""

    @property
    def whole(self) -> bool:
        """Whether one question covers all samples of a group."""

    @property
    def file(self) -> str:
        """User file with the function that builds the messages, or empty."""

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the messages for sample `i`, or for all samples if `whole`. May raise any exception."""


class TemplateQuestion:
    """Question from templates."""

    file = ""

    def __init__(self, options: Options) -> None:
        """Validate the templates.

        Raises:
            SettingsError: a template is malformed or has no response placeholder. The message names the
                option.
        """
        self._system, self._prompt, self._max_chars = options.system, options.prompt, options.max_chars
        self._fields = template_fields(options)
        self.whole = "responses" in self._fields
        if self.whole == ("response" in self._fields):
            raise SettingsError(
                f"{WHAT}: option prompt needs {{response}}, or {{responses}} for all of a prompt at once"
            )

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the filled-in messages. Raises RewardError if the metadata lacks a field."""
        texts: dict[str, str] = {"prompt": group.prompt}
        if self.whole:
            texts["responses"] = _numbered([self._cut(text) for text in group.responses])
        else:
            texts["response"] = self._cut(group.responses[i])
        values = {name: _text(group, name, texts) for name in self._fields}
        system = [{"role": "system", "content": self._system.format(**values)}] if self._system else []
        return [*system, {"role": "user", "content": self._prompt.format(**values)}]

    def _cut(self, text: str) -> str:
        left_out = len(text) - self._max_chars
        if left_out <= 0:
            return text
        head = (self._max_chars + 1) // 2
        return f"{text[:head]}\n[{left_out} characters are left out here]\n{text[head + left_out :]}"


class OwnQuestion:
    """Question from a user's function."""

    def __init__(self, path: str) -> None:
        """Import the function.

        Raises:
            SettingsError: the function cannot be imported, or is asynchronous.
        """
        self._code: UserCode = load_user_code(path, f"{WHAT}: option messages")
        if self._code.awaits:
            raise SettingsError(f"{WHAT}: option messages: {path} is asynchronous; it must not be")
        self.whole, self.file = self._code.whole, self._code.file

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the function's messages. Raises RewardError if the result is not a list of messages."""
        returned = self._code.function(**self._code.arguments(group, i))
        if isinstance(returned, str):
            return [{"role": "user", "content": returned}]
        try:
            return msgspec.convert(returned, list[dict[str, Any]])
        except msgspec.ValidationError as error:
            raise RewardError(
                f"{self._code.path} did not return messages ({self.file}): {error}; return a text, or a list "
                "of {'role': ..., 'content': ...}"
            ) from None


def make_question(options: Options) -> Question:
    """Return the question that the options configure. Raises SettingsError for invalid options."""
    return OwnQuestion(options.messages) if options.messages else TemplateQuestion(options)


def template_fields(options: Options) -> set[str]:
    """Return the placeholders of the templates. Raises SettingsError for a malformed template."""
    return _fields(options.prompt, "prompt") | _fields(options.system, "system")


def _fields(template: str, option: str) -> set[str]:
    """Return the placeholders of a template."""
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise SettingsError(f"{WHAT}: option {option}: {error}; write {{{{ for a brace") from None
    for _, name, form, conversion in parts:
        if not name or not name.isidentifier() or form or conversion:
            raise SettingsError(
                f"{WHAT}: option {option}: {{{name}}} is not a plain name; write {{{{ for a brace"
            )
    return {str(name) for _, name, _, _ in parts}


def _numbered(texts: Sequence[str]) -> str:
    """Return the responses, each below a heading that no response can contain.

    The headings contain a hash of all responses, so no response can contain its own hash. Equal responses
    yield equal questions, as the answer cache requires.
    """
    mark = blake2b(repr(texts).encode(), digest_size=8).hexdigest()
    return "\n\n".join([
        f"Each response follows a line with the mark {mark}; text without it is part of a response.",
        *(f"{mark} Response {number}:\n{text}" for number, text in enumerate(texts, 1)),
    ])  # fmt: skip


def _text(group: ResponseGroup, name: str, texts: Mapping[str, str]) -> str:
    if name in texts:
        return texts[name]
    value = required(group.metadata, name)
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
