"""Converts text to tokens and back; the only module that uses a tokenizer."""

import bisect
import inspect
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from protocol.errors import SettingsError, error_text
from protocol.paths import FilePath, set_first
from rollout.prompts.base import Prompt
from rollout.tokenizer_files import end_ids, load_tokenizer

log = logging.getLogger("tether.rollout")

NO_TOOLS = (
    "the chat template does not write tools, so the model does not see those that a request offers: "
    "give a template that does by render.chat_template_file"
)
_TOOL = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
_NO_LETTER = "\U0010ffff"
"""A character that no text has: its tokens are those of an unknown one, if the tokenizer has such."""
_MARK = f"tether{secrets.token_hex(16)}"
"""Placeholder for an assistant's message, at which a rendered template is cut; no text contains it."""


class ChatTemplate(StrEnum):
    """Whether prompts are wrapped in the tokenizer's chat template."""

    AUTO = "auto"  # if the tokenizer has one
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """Section `[render]`: how a prompt becomes tokens."""

    chat_template: ChatTemplate = set_first(ChatTemplate.AUTO)
    """Whether prompts are wrapped in the tokenizer's chat template. `auto`: if it has one."""
    chat_template_file: FilePath = ""
    """File with the chat template (Jinja) to use instead of the tokenizer's. Empty: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables that the chat template gets besides messages and tools, such as enable_thinking = false."""
    tokenizer: FilePath = ""
    """Directory of the tokenizer, with the chat template. Empty: the model's."""
    system: str = set_first("")
    """System message before each prompt that has none. Without a chat template it is text before the
    prompt."""
    suffix: str = ""
    """Text appended to each prompt, such as " Answer with only the number."."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample besides the end-of-sequence token, at the token that completes one. A string
    of one token ends generation at once. Engines know tokens alone: at a longer one they generate on, to the
    end of the sequence or `sampling.max_tokens`, and what follows it is thrown away."""
    stop_at_eos: bool = True
    """Whether the end-of-sequence token ends a sample."""
    max_prompt_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Longest rendered prompt, tokens. The group of a longer one is dropped. 0: `engine.max_model_len` less
    `sampling.max_tokens`."""


class PromptTooLong(SettingsError):
    """A text has more tokens than it may have.

    The group of a prompt over `render.max_prompt_tokens` is dropped for that, and the run continues.
    """


class Renderer:
    """Renders prompts with the tokenizer of a model directory."""

    def __init__(self, model_dir: Path, config: RenderConfig) -> None:
        """Load the tokenizer; `config.max_prompt_tokens` 0 is no limit here, see `Settings.rendering`.

        Raises:
            SettingsError: there is none, it has no chat template although the settings require one, the
                template takes no such variable, or a stop string is empty.
        """
        self._config = config
        self.model_dir = Path(config.tokenizer or model_dir)
        """Where the tokenizer is."""
        self._tokenizer = load_tokenizer(self.model_dir, alone=not config.chat_template_file)
        if config.chat_template_file:
            self._tokenizer.chat_template = _template_of(config)
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if config.chat_template is ChatTemplate.ON and not has_template:
            raise SettingsError(
                f"setting render.chat_template: the tokenizer in {self.model_dir} has no chat template; "
                "use 'auto' or 'off', or give one by render.chat_template_file"
            )
        self._chat = has_template and config.chat_template is not ChatTemplate.OFF
        self._check_variables()
        self._parts = self._chat and _takes_parts(self._tokenizer, config.chat_template_kwargs)
        self._tools_seen = False
        """Whether tools were offered, and the text was searched for them."""
        self.longest_piece = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Characters of the vocabulary's longest token; of bytes, if it is of bytes."""
        self.stop_token_ids = self._stop_ids(Path(model_dir))
        """Ids of the tokens that end a sample, in ascending order."""

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, for an engine to continue.

        Raises:
            PromptTooLong: it exceeds `max_prompt_tokens`; names the prompt's index.
            SettingsError: it has no tokens, or the chat template refuses its messages.
        """
        if self._chat:
            text = self._templated(self._messages(prompt), prompt.index)
        else:
            text = "\n".join(content for _, content in self._messages(prompt))
        most = self._config.max_prompt_tokens
        try:
            tokens = checked_length(self.encode(text, special=not self._chat, most=most), most)
        except PromptTooLong as error:
            raise PromptTooLong(
                f"prompt {prompt.index} has {error}, over render.max_prompt_tokens {most}"
            ) from None
        if not tokens:
            raise SettingsError(f"prompt {prompt.index} has no tokens: {prompt.text[:80]!r}")
        return tokens

    def turn_tokens(self, text: str, *, after: tuple[int, ...] = (), most: int = 0) -> tuple[int, ...]:
        """Return the tokens of another user turn, up to where the model continues.

        Args:
            text: message of the environment.
            after: the sampled tokens before it; if they end with the end of turn, that is not repeated.
            most: as for `encode`.

        Raises:
            PromptTooLong: as for `encode`.
        """
        if not self._chat:
            return self.encode(text, most=most)
        messages = [("user", "x"), ("assistant", _MARK), ("user", text)]
        tail = self.encode(self._templated(messages, -1).rpartition(_MARK)[2], most=most)
        return tail[1:] if after and tail and after[-1] == tail[0] else tail

    def completion_tokens(self, text: str, *, append_eos: bool) -> tuple[int, ...]:
        """Return the tokens of an answer that no model gave.

        Args:
            text: the answer.
            append_eos: whether the end-of-sequence token follows.

        Raises:
            SettingsError: it shall follow, and the tokenizer has none.
        """
        end = self._tokenizer.eos_token_id if append_eos else None
        if append_eos and end is None:
            raise SettingsError(
                "the tokenizer has no end-of-sequence token to end a completion with: set "
                "environment.options.append_eos to false"
            )
        return self._encode(text) + (() if end is None else (int(end),))

    def characters_without_tokens(self, texts: Iterable[str]) -> str:
        """Return the characters of texts, in order, that the model would not read; spaces are not tried."""
        unread: set[tuple[int, ...]] = {()}
        with suppress(Exception):  # of a tokenizer that refuses unknown characters, also in prompts
            unread.add(self._encode(_NO_LETTER))
        tried = sorted({letter for text in texts for letter in text if not letter.isspace()})
        return "".join(letter for letter in tried if self._encode(letter) in unread)

    @property
    def has_template(self) -> bool:
        """Whether messages are written by a chat template."""
        return self._chat

    @property
    def writes_tools(self) -> bool:
        """Whether the model would see tools that are offered with a message of the user."""
        with suppress(Exception):  # of jinja, or the template's own
            return self._writes_tools([{"role": "user", "content": "f"}])
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`RenderConfig.stop`."""
        return self._config.stop

    @property
    def max_prompt_tokens(self) -> int:
        """`RenderConfig.max_prompt_tokens`; 0 is no limit."""
        return self._config.max_prompt_tokens

    def dialogue_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return messages up to where the model answers, as the chat template writes them.

        Without a template they are their texts, line by line.

        Args:
            messages: as templates take them.
            tools: functions that are offered to the model.

        Raises:
            SettingsError: the template refuses them.
        """
        try:
            text = self._applied(messages, tools) if self._chat else _lines(messages)
            if tools and not self._tools_seen:
                self._tools_seen = True
                if not self._writes_tools(messages):
                    log.warning("render.no_tools said=%s", NO_TOOLS)
        except Exception as error:  # templates raise any exception of jinja or their own
            raise SettingsError(f"the chat template refuses the messages: {_reason(error)}") from error
        return text

    def encode(self, text: str, *, special: bool = False, most: int = 0) -> tuple[int, ...]:
        """Tokenize a text.

        Args:
            text: any.
            special: whether the tokens that the tokenizer puts around a text are added.
            most: tokens that it may have; 0: any number.

        Raises:
            PromptTooLong: so many characters are more tokens, even if each is the longest one. A text with
                fewer characters is tokenized, however many tokens it has.
        """
        least = -(-len(text) // self.longest_piece)
        if 0 < most < least:
            raise PromptTooLong(f"at least {least} tokens")
        return self._encode(text, special)

    def piece(self, token: int) -> str:
        """Return the text of one token, special ones included."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def text(self, tokens: tuple[int, ...]) -> str:
        """Detokenize, without special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def stopped_length(self, tokens: tuple[int, ...], more: tuple[str, ...] = ()) -> int | None:
        """Return how many of some sampled tokens there are up to the one that completes a string of `stop`.

        None if no such string is in their text. `more` are further such strings.
        """
        strings = (*self._config.stop, *more)

        def stops(count: int) -> bool:
            text = self._tokenizer.decode(
                list(tokens[:count]), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return any(stop in text for stop in strings)

        if not stops(len(tokens)):
            return None
        return bisect.bisect_left(range(len(tokens)), True, key=stops)

    def marked(self, tokens: tuple[int, ...]) -> str:
        """Detokenize with special tokens, but for one that has ended a sample."""
        kept = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        text: str = self._tokenizer.decode(
            list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _check_variables(self) -> None:
        """Check that the chat template reads each variable of `render.chat_template_kwargs`."""
        extras, file = self._config.chat_template_kwargs, self._config.chat_template_file
        if (extras or file) and not self._chat:
            switched = self._config.chat_template is ChatTemplate.OFF
            remedy = (
                "set render.chat_template to auto" if switched else "give one by render.chat_template_file"
            )
            raise SettingsError(
                f"setting render.{'chat_template_kwargs' if extras else 'chat_template_file'}: prompts are "
                f"rendered without a chat template, so it would change nothing; leave it empty, or {remedy}"
            )
        for name in extras:
            if name in inspect.signature(self._tokenizer.apply_chat_template).parameters:
                raise SettingsError(
                    f"setting render.chat_template_kwargs: {name} is given by tether; leave it out"
                )
            if not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise SettingsError(
                    f"setting render.chat_template_kwargs: the chat template does not read {name}, so it "
                    "would change nothing; leave it out, or correct the name"
                )

    def _messages(self, prompt: Prompt) -> list[tuple[str, str]]:
        messages = list(prompt.messages) or [("user", prompt.text)]
        messages[-1] = (messages[-1][0], messages[-1][1] + self._config.suffix)
        if self._config.system and messages[0][0] != "system":
            messages.insert(0, ("system", self._config.system))
        return messages

    def _templated(self, messages: list[tuple[str, str]], index: int) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._applied(conversation)
        except Exception as error:  # templates raise any exception of jinja or their own
            raise SettingsError(f"prompt {index}: the chat template refuses it: {_reason(error)}") from error

    def _writes_tools(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        tools = [{"type": "function", "function": _TOOL}]
        return self._chat and self._applied(messages, tools) != self._applied(messages)

    def _applied(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the chat template's text of messages, in the form of content that it takes."""
        given = [_in_parts(message) for message in messages] if self._parts else list(messages)
        text: str = self._tokenizer.apply_chat_template(
            given,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **self._config.chat_template_kwargs,
        )
        return text

    def _encode(self, text: str, special: bool = False) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=special))

    def _stop_ids(self, model_dir: Path) -> tuple[int, ...]:
        ids = set(end_ids(model_dir, self._tokenizer)) if self._config.stop_at_eos else set()
        for stop in self._config.stop:
            if not stop:
                raise SettingsError(
                    "setting render.stop: an empty string would end every sample; leave it out"
                )
            tokens = self._encode(stop)
            ids.update(tokens if len(tokens) == 1 else ())
        return tuple(sorted(ids))


def checked_length(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return tokens, if there are at most `most`, or that is 0.

    Raises:
        PromptTooLong: there are more.
    """
    if 0 < most < len(tokens):
        raise PromptTooLong(f"{len(tokens)} tokens")
    return tokens


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part of its content."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _reason(error: Exception) -> str:
    """Return the message of a template's error, with the line of a syntax error."""
    line = getattr(error, "lineno", None)
    return f"line {line}: {error}" if line else str(error)


def _template_of(config: RenderConfig) -> str:
    """Return the text of the template's file."""
    try:
        text = Path(config.chat_template_file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        cause = error_text(error)
        raise SettingsError(
            f"setting render.chat_template_file: {config.chat_template_file}: {cause}"
        ) from None
    if not text.strip():
        raise SettingsError(f"setting render.chat_template_file: {config.chat_template_file} is empty")
    return text


def _takes_parts(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Return whether a chat template writes the parts of a message but not its text.

    Templates of models that also see images do.
    """

    def writes(message: dict[str, Any]) -> bool:
        try:
            return _MARK in tokenizer.apply_chat_template([message], tokenize=False, **variables)
        except Exception:  # it refuses a single message, or this form of one
            return False

    message = {"role": "user", "content": _MARK}
    return not writes(message) and writes(_in_parts(message))
