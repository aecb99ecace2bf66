"""Makes the messages for a judge, from a template or by a function of the user."""

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

OF_GROUP = {"prompt", "response", "responses"}
"""Names in templates that are not fields of the metadata."""
Messages = Sequence[Mapping[str, Any]]


class Question(Protocol):
    """Makes the messages for one sample, or for all of a group."""

    @property
    def whole(self) -> bool:
        """Whether it asks for all samples of a group at once."""

    @property
    def file(self) -> str:
        """File of the user that it comes from, or empty."""

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the messages for sample `i`, or for all. May raise anything."""


class TemplateQuestion:
    """Fills in templates."""

    file = ""

    def __init__(self, options: Options) -> None:
        """Check the templates.

        Raises:
            SettingsError: a template is not well formed, or names no response; names the option.
        """
        self._system, self._prompt, self._max_chars = options.system, options.prompt, options.max_chars
        self._fields = template_fields(options)
        self.whole = "responses" in self._fields
        if self.whole == ("response" in self._fields):
            raise SettingsError(
                f"{WHAT}: option prompt needs {{response}}, or {{responses}} for all of a prompt at once"
            )

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the messages. Raises RewardError if the metadata lacks a field."""
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
    """Calls a function of the user."""

    def __init__(self, path: str) -> None:
        """Import the function.

        Raises:
            SettingsError: it cannot be called.
        """
        self._code: UserCode = load_user_code(path, f"{WHAT}: option messages")
        if self._code.awaits:
            raise SettingsError(f"{WHAT}: option messages: {path} is asynchronous; it must not be")
        self.whole, self.file = self._code.whole, self._code.file

    def messages(self, group: ResponseGroup, i: int) -> Messages:
        """Return the function's messages. Raises RewardError if its result is no list of messages."""
        returned = self._code.function(**self._code.arguments(group, i))
        if isinstance(returned, str):
            return [{"role": "user", "content": returned}]
        try:
            return msgspec.convert(returned, list[dict[str, Any]])
        except msgspec.ValidationError as error:
            raise RewardError(
                f"{self._code.path} returned no messages ({self.file}): {error}; return a text, or a list of "
                "{'role': ..., 'content': ...}"
            ) from None


def make_question(options: Options) -> Question:
    """Return what makes the messages. Raises SettingsError if options are wrong."""
    return OwnQuestion(options.messages) if options.messages else TemplateQuestion(options)


def template_fields(options: Options) -> set[str]:
    """Return the names in the templates. Raises SettingsError if one is not well formed."""
    return _fields(options.prompt, "prompt") | _fields(options.system, "system")


def _fields(template: str, option: str) -> set[str]:
    """Return the names in a template."""
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise SettingsError(f"{WHAT}: option {option}: {error}; write {{{{ for a brace") from None
    for _, name, form, conversion in parts:
        if not name or not name.isidentifier() or form or conversion:
            raise SettingsError(
                f"{WHAT}: option {option}: {{{name}}} is no plain name; write {{{{ for a brace"
            )
    return {str(name) for _, name, _, _ in parts}


def _numbered(texts: Sequence[str]) -> str:
    """Return the responses, each below a heading that no response can contain.

    The headings have a mark that depends on all responses: none can hold the mark that it leads to. Equal
    responses make equal questions, as the cache of answers needs.
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
