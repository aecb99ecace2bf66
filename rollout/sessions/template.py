"""Renders requests as tokens: a whole dialogue, or only the messages after an already tokenized answer."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from protocol.errors import SettingsError
from rollout.render import Renderer
from rollout.sessions.messages import Dialogue, Message


def dialogue_tokens(renderer: Renderer, dialogue: Dialogue, max_tokens: int = 0) -> tuple[int, ...]:
    """Return the tokens of a dialogue, up to the start of the model's answer.

    `max_tokens` is as in `Renderer.encode`.

    Raises:
        PromptTooLong: the text cannot fit into `max_tokens` tokens.
        SettingsError: the chat template rejects the dialogue.
    """
    text = _render_messages(renderer, dialogue.messages, dialogue.tools)
    return renderer.encode(text, special=not renderer.has_template, max_tokens=max_tokens)


def new_tokens(
    renderer: Renderer, dialogue: Dialogue, first: int, sampled: Sequence[int], max_tokens: int = 0
) -> tuple[int, ...]:
    """Return the tokens of the dialogue's messages from `first` on, to append to an answer.

    The answer itself is not rendered, because its sampled tokens are kept. The template renders the messages
    after a placeholder answer, and the text after the placeholder is tokenized. An end-of-turn token at the
    end of `sampled` is not repeated.

    Args:
        renderer: renderer with the chat template.
        dialogue: the request.
        first: index of the first new message; the message before it is the answer.
        sampled: tokens of the answer.
        max_tokens: token limit; 0: none. Checked as in `Renderer.encode`.

    Raises:
        PromptTooLong: the text cannot fit into `max_tokens` tokens.
        SettingsError: the template cannot render messages after an answer.
    """
    if not renderer.has_template:
        return renderer.encode(renderer.dialogue_text(dialogue.messages[first:]), max_tokens=max_tokens)
    tail = renderer.encode(_text_after_answer(renderer, dialogue, first), max_tokens=max_tokens)
    return tail[_closing_tokens(renderer, tail, sampled) :]


def _closing_tokens(renderer: Renderer, tail: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of leading tokens of `tail` that only close an answer which already ended its turn.

    These are the tokens up to the end-of-turn token. Some templates write other special tokens before it.
    """
    if not sampled or sampled[-1] not in tail:
        return 0
    if renderer.text((sampled[-1],)) and sampled[-1] not in renderer.stop_token_ids:
        return 0  # the token is part of the answer's text
    end = tail.index(sampled[-1])
    return 0 if renderer.text(tuple(tail[:end])).strip() else end + 1


def _text_after_answer(renderer: Renderer, dialogue: Dialogue, first: int) -> str:
    """Return the rendered text after the answer."""
    new, answer, tools = dialogue.messages[first:], dialogue.messages[first - 1], dialogue.tools
    mark, result = (
        f"tether{secrets.token_hex(16)}{what}" for what in ("answer", "result")
    )  # in no text of the request
    # Some templates repeat the system message or the tools before the last user message.
    before = [*_system(dialogue.messages), {"role": "user", "content": "x"}]
    if calls := answer.get("tool_calls"):
        # Some templates render a tool result only after its call, or end a call with another token.
        called = {**answer, "content": "", "tool_calls": [_marked(call, mark) for call in calls]}
        try:
            _, mark_found, text = _render_messages(renderer, [*before, called, *new], tools).rpartition(mark)
        except SettingsError:
            mark_found = text = ""  # a template without tool calls may still render their results, see below
        if mark_found and (ends := [place for stop in _stops(renderer) if (place := text.find(stop)) >= 0]):
            return text[min(ends) :]
    plain = {"role": "assistant", "content": mark}
    results = [{**message, "content": result} for message in new if message["role"] == "tool"]
    rendered = _render_messages(renderer, [*before, plain, *results], tools) if results else ""
    if results and result not in rendered.rpartition(mark)[2]:
        raise SettingsError("the chat template leaves out the result of a tool")
    _, mark_found, text = _render_messages(renderer, [*before, plain, *new], tools).rpartition(mark)
    if not mark_found:
        raise SettingsError("the chat template leaves out an answer that others follow")
    return text


def _render_messages(renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Return rendered messages. Some templates accept tool call arguments only as text."""
    try:
        return renderer.dialogue_text(messages, tools)
    except SettingsError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        try:
            return renderer.dialogue_text([_as_text(message) for message in messages], tools)
        except SettingsError:
            pass
        raise


def _as_text(message: Message) -> Message:
    """Return a message with its tool call arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [_with_arguments(call, json.dumps(_arguments(call))) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _arguments(call: dict[str, Any]) -> Any:
    return call["function"]["arguments"]


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _marked(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a tool call whose only argument is the mark."""
    return _with_arguments(call, {"x": mark})


def _system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[:1] if messages[0]["role"] == "system" else ()


def _stops(renderer: Renderer) -> list[str]:
    return [text for token in renderer.stop_token_ids if (text := renderer.piece(token))]
