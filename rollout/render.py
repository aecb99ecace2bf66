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
from protocol.paths import FilePath, basic_setting
from rollout.prompts.base import Prompt
from rollout.tokenizer_files import end_ids, load_tokenizer

log = logging.getLogger("tether.rollout")

NO_TOOLS = (
    "the chat template does not write tools, so the model does not see those that a request offers: "
    "give a template that does by render.chat_template_file"
)
_TOOL = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
_NO_LETTER = "\U0010ffff"
"""Character that occurs in no text. Its token is the tokenizer's unknown token, if there is one."""
_MARK = f"tether{secrets.token_hex(16)}"
"""Placeholder for an assistant message; rendered templates are split at it. No text contains it."""


class ChatTemplate(StrEnum):
    """Policy for wrapping prompts in the tokenizer's chat template."""

    AUTO = "auto"  # if the tokenizer has a chat template
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """Section `[render]`: conversion of prompts into tokens."""

    chat_template: ChatTemplate = basic_setting(ChatTemplate.AUTO)
    """Whether prompts are wrapped in the tokenizer's chat template. `auto`: if it has a template."""
    chat_template_file: FilePath = ""
    """Jinja file with a chat template that replaces the tokenizer's. Empty: use the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables passed to the chat template besides messages and tools, such as enable_thinking = false."""
    tokenizer: FilePath = ""
    """Directory of the tokenizer and its chat template. Empty: the model directory."""
    system: str = basic_setting("")
    """System message prepended to prompts that lack one. Without a chat template, plain text before the
    prompt."""
    suffix: str = ""
    """Text appended to each prompt, such as " Answer with only the number."."""
    stop: tuple[str, ...] = ()
    """Additional stop strings. A sample ends at the token that completes a stop string, or at the
    end-of-sequence token. A single-token string stops generation at once. For longer strings, the engine
    generates up to the end of the sequence or `sampling.max_tokens`, and the tokens after the string are
    discarded."""
    stop_at_eos: bool = True
    """Whether the end-of-sequence token ends a sample."""
    max_prompt_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Maximum length of a rendered prompt, tokens. Groups with longer prompts are dropped. 0:
    `engine.max_model_len` minus `sampling.max_tokens`."""


class PromptTooLong(SettingsError):
    """Text that exceeds its token limit.

    If a prompt exceeds `render.max_prompt_tokens`, its group is dropped and the run continues.
    """


class Renderer:
    """Converter between text and tokens, with the tokenizer of a model directory."""

    def __init__(self, model_dir: Path, config: RenderConfig) -> None:
        """Load the tokenizer.

        `config.max_prompt_tokens` 0 means no limit here; `Settings.rendering` fills in the default.

        Raises:
            SettingsError: the tokenizer is missing, lacks the required chat template, or its template does
                not read a configured variable; or a stop string is empty.
        """
        self._config = config
        self.model_dir = Path(config.tokenizer or model_dir)
        """Directory of the tokenizer."""
        self._tokenizer = load_tokenizer(self.model_dir, plain_suffices=not config.chat_template_file)
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
        """Whether tools were offered and the rendered text was checked for them."""
        self.longest_piece = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Length of the longest vocabulary token, characters; bytes for byte-level vocabularies."""
        self.stop_token_ids = self._stop_ids(Path(model_dir))
        """Ids of the tokens that end a sample, ascending."""

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, for an engine to continue.

        Raises:
            PromptTooLong: the prompt exceeds `max_prompt_tokens`; the message names its index.
            SettingsError: the prompt has no tokens, or the chat template rejects its messages.
        """
        if self._chat:
            text = self._templated(self._messages(prompt), prompt.index)
        else:
            text = "\n".join(content for _, content in self._messages(prompt))
        max_tokens = self._config.max_prompt_tokens
        try:
            tokens = checked_length(
                self.encode(text, special=not self._chat, max_tokens=max_tokens), max_tokens
            )
        except PromptTooLong as error:
            raise PromptTooLong(
                f"prompt {prompt.index} has {error}, over render.max_prompt_tokens {max_tokens}"
            ) from None
        if not tokens:
            raise SettingsError(f"prompt {prompt.index} has no tokens: {prompt.text[:80]!r}")
        return tokens

    def turn_tokens(self, text: str, *, after: tuple[int, ...] = (), max_tokens: int = 0) -> tuple[int, ...]:
        """Return the tokens of a further user turn, up to the start of the model's answer.

        Args:
            text: message of the environment.
            after: sampled tokens before the turn. If they end with the end-of-turn token, it is not repeated.
            max_tokens: token limit; 0: none. Checked as in `encode`.

        Raises:
            PromptTooLong: the text cannot fit into `max_tokens` tokens.
        """
        if not self._chat:
            return self.encode(text, max_tokens=max_tokens)
        messages = [("user", "x"), ("assistant", _MARK), ("user", text)]
        tail = self.encode(self._templated(messages, -1).rpartition(_MARK)[2], max_tokens=max_tokens)
        return tail[1:] if after and tail and after[-1] == tail[0] else tail

    def completion_tokens(self, text: str, *, append_eos: bool) -> tuple[int, ...]:
        """Return the tokens of an answer that was not generated by a model.

        Args:
            append_eos: whether to append the end-of-sequence token.

        Raises:
            SettingsError: the tokenizer has no end-of-sequence token to append.
        """
        end = self._tokenizer.eos_token_id if append_eos else None
        if append_eos and end is None:
            raise SettingsError(
                "the tokenizer has no end-of-sequence token to end a completion with: set "
                "environment.options.append_eos to false"
            )
        return self._encode(text) + (() if end is None else (int(end),))

    def characters_without_tokens(self, texts: Iterable[str]) -> str:
        """Return the sorted characters that the tokenizer drops or cannot represent, except spaces."""
        unread: set[tuple[int, ...]] = {()}
        with suppress(Exception):  # the tokenizer may reject unknown characters, also in prompts
            unread.add(self._encode(_NO_LETTER))
        tried = sorted({letter for text in texts for letter in text if not letter.isspace()})
        return "".join(letter for letter in tried if self._encode(letter) in unread)

    @property
    def has_template(self) -> bool:
        """Whether a chat template renders messages."""
        return self._chat

    @property
    def writes_tools(self) -> bool:
        """Whether the chat template renders tools offered with a user message."""
        with suppress(Exception):  # exceptions of jinja or the template
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
        """Return messages as rendered by the chat template, up to the start of the model's answer.

        Without a template, the message contents are joined by newlines.

        Args:
            messages: messages in the form that chat templates read.
            tools: functions offered to the model.

        Raises:
            SettingsError: the template rejects the messages.
        """
        try:
            text = self._applied(messages, tools) if self._chat else _lines(messages)
            if tools and not self._tools_seen:
                self._tools_seen = True
                if not self._writes_tools(messages):
                    log.warning("render.no_tools said=%s", NO_TOOLS)
        except Exception as error:  # templates raise exceptions of jinja or their own
            raise SettingsError(f"the chat template refuses the messages: {_reason(error)}") from error
        return text

    def encode(self, text: str, *, special: bool = False, max_tokens: int = 0) -> tuple[int, ...]:
        """Tokenize a text.

        Args:
            special: whether to add the tokenizer's special tokens around the text.
            max_tokens: token limit; 0: none.

        Raises:
            PromptTooLong: the text exceeds the limit even if every token is the longest of the vocabulary.
                Other texts are tokenized, even if the result exceeds the limit.
        """
        min_tokens = -(-len(text) // self.longest_piece)
        if 0 < max_tokens < min_tokens:
            raise PromptTooLong(f"at least {min_tokens} tokens")
        return self._encode(text, special)

    def piece(self, token: int) -> str:
        """Return the text of one token; special tokens are included."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def text(self, tokens: tuple[int, ...]) -> str:
        """Detokenize, without special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def stopped_length(self, tokens: tuple[int, ...], extra_stops: tuple[str, ...] = ()) -> int | None:
        """Return the number of tokens up to the end of the first stop string; None if there is none.

        Args:
            extra_stops: stop strings in addition to `RenderConfig.stop`.
        """
        strings = (*self._config.stop, *extra_stops)

        def stops(count: int) -> bool:
            text = self.with_special(tokens[:count])
            return any(stop in text for stop in strings)

        if not stops(len(tokens)):
            return None
        return bisect.bisect_left(range(len(tokens)), True, key=stops)

    def marked(self, tokens: tuple[int, ...]) -> str:
        """Detokenize with special tokens, except a final stop token."""
        return self.with_special(tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens)

    def with_special(self, tokens: tuple[int, ...]) -> str:
        """Detokenize with special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
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
                    f"setting render.chat_template_kwargs: {name} is given by tether; remove it"
                )
            if not re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template)):
                raise SettingsError(
                    f"setting render.chat_template_kwargs: the chat template does not read {name}, so it "
                    "would change nothing; remove it, or correct the name"
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
        except Exception as error:  # templates raise exceptions of jinja or their own
            raise SettingsError(f"prompt {index}: the chat template refuses it: {_reason(error)}") from error

    def _writes_tools(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        tools = [{"type": "function", "function": _TOOL}]
        return self._chat and self._applied(messages, tools) != self._applied(messages)

    def _applied(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the rendered chat template, with message content in the form that the template reads."""
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
                raise SettingsError("setting render.stop: an empty string would end every sample; remove it")
            tokens = self._encode(stop)
            ids.update(tokens if len(tokens) == 1 else ())
        return tuple(sorted(ids))


def checked_length(tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Return `tokens` if there are at most `max_tokens`, or if `max_tokens` is 0.

    Raises:
        PromptTooLong: there are more than `max_tokens` tokens.
    """
    if 0 < max_tokens < len(tokens):
        raise PromptTooLong(f"{len(tokens)} tokens")
    return tokens


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in messages)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text wrapped in a content part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _reason(error: Exception) -> str:
    """Return the text of a template error, with the line number of a syntax error."""
    line = getattr(error, "lineno", None)
    return f"line {line}: {error}" if line else str(error)


def _template_of(config: RenderConfig) -> str:
    """Return the content of the configured template file."""
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
    """Return whether a chat template renders content parts but not plain text, as multimodal templates do."""

    def writes(message: dict[str, Any]) -> bool:
        try:
            return _MARK in tokenizer.apply_chat_template([message], tokenize=False, **variables)
        except Exception:  # the template may reject a lone message or this content form
            return False

    message = {"role": "user", "content": _MARK}
    return not writes(message) and writes(_in_parts(message))
