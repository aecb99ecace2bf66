"""Creates a user's prompt source: a function that returns rows, or a `PromptSource` class."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NoReturn

from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute, located
from rollout.prompts.base import Prompt, PromptConfig, PromptSource
from rollout.prompts.rows import RowSource, encoded_prompt, prompts_of

MEMBERS = ("fingerprint", "size", "at", "held_out", "trained_texts")
"""Required members of a `PromptSource`."""


class UserPromptSource:
    """Validating wrapper of a user's `PromptSource`; errors name the user's class."""

    def __init__(self, source: Any, what: str) -> None:
        """Check the source's members.

        Args:
            source: instance of the user's class.
            what: prefix of errors.

        Raises:
            SettingsError: a member is missing, or `fingerprint` or `size` is invalid.
        """
        for name in MEMBERS:
            if not hasattr(source, name):
                raise SettingsError(f"{what}: it has no {name}; write all of {', '.join(MEMBERS)}")
        self._source, self._what = source, what
        self.fingerprint: str = source.fingerprint
        self.size: int | None = source.size
        if not isinstance(self.fingerprint, str):
            self._refuse("fingerprint", self.fingerprint, "text")
        if self.size is not None and (not isinstance(self.size, Integral) or self.size < 1):
            self._refuse("size", self.size, "a whole number of prompts, at least 1, or None")

    def at(self, index: int) -> Prompt:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"prompt {index} is outside the stream of {self.size or 'endlessly many'}")
        return replace(self._checked(self._called("at", index), f"at({index})"), index=index)

    def held_out(self) -> Sequence[Prompt]:
        return [self._checked(prompt, "held_out()") for prompt in self._listed("held_out")]

    def trained_texts(self) -> Iterable[str]:
        texts = self._listed("trained_texts")
        for text in texts:
            if not isinstance(text, str):
                self._refuse("trained_texts()", text, "text")
        return texts

    def _called(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._source, name)(*arguments)
        except Exception as error:  # user code may raise anything
            raise SettingsError(f"{self._what}: {located(error)}") from None

    def _listed(self, name: str) -> list[Any]:
        returned = self._called(name)
        if not isinstance(returned, Iterable):
            self._refuse(f"{name}()", returned, "a list")
        try:
            return list(returned)
        except Exception as error:  # a user's generator may raise anything
            raise SettingsError(f"{self._what}: {located(error)}") from None

    def _checked(self, prompt: Any, where: str) -> Prompt:
        """Return the validated prompt with its messages as tuples. Raises SettingsError if it is invalid."""
        if not isinstance(prompt, Prompt) or not isinstance(prompt.text, str) or not prompt.text:
            self._refuse(where, prompt, "a Prompt with a text that is not empty")
        messages: Any = prompt.messages
        if not isinstance(messages, (tuple, list)) or not all(map(_is_pair, messages)):
            self._refuse(f"{where}.messages", messages, "pairs (role, content) of texts")
        if not isinstance(prompt.metadata, Mapping):
            self._refuse(f"{where}.metadata", prompt.metadata, "a mapping")
        converted = replace(prompt, messages=tuple((role, content) for role, content in messages))
        try:
            encoded_prompt(converted)
        except SettingsError as error:
            raise SettingsError(f"{self._what}: {where}: {error}") from None
        return converted

    def _refuse(self, member: str, value: object, expected: str) -> NoReturn:
        raise SettingsError(f"{self._what}: {member} is {str(value)[:80]!r}, it must be {expected}")


def _is_pair(message: Any) -> bool:
    is_list = isinstance(message, (tuple, list)) and len(message) == 2
    return is_list and all(isinstance(text, str) for text in message)


def make(config: PromptConfig) -> PromptSource:
    """Return the source created by `config.source`, a `MODULE:NAME`, with `config.options`.

    A class gets `config` as its first argument and must implement `PromptSource`. The rows of a function are
    parsed, ordered and held out like rows of a file.

    Raises:
        SettingsError: module or name is missing, the code raises or rejects its arguments, a row has no
            question, or the class is not a `PromptSource`; the message names the file.
    """
    item, file = import_attribute(config.source, "setting prompts.source")
    what = f"setting prompts.source: {config.source} in {file}"
    if not isinstance(item, type):
        rows = _rows(what, item, config)
        return RowSource(config, lambda text, setting: rows)
    return UserPromptSource(
        call(what, item, "the section [prompts] and prompts.options", (config,), config.options), what
    )


def _rows(what: str, function: Any, config: PromptConfig) -> list[Prompt]:
    """Return the prompts of the rows that a function returns or yields."""
    returned = call(what, function, "prompts.options", (), config.options)

    def numbered() -> Iterator[tuple[str, Any]]:
        try:
            for number, row in enumerate(returned):
                yield f"{config.source}: row {number}", row
        except Exception as error:  # user code may raise anything
            raise SettingsError(f"{what}: {located(error)}") from None

    return prompts_of(numbered(), config)
