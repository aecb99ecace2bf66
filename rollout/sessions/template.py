"""Writes requests as tokens: a whole dialogue, or only the messages after an answer that keeps its tokens."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from protocol.errors import SettingsError
from rollout.render import Renderer
from rollout.sessions.messages import Dialogue, Message


def whole(renderer: Renderer, dialogue: Dialogue, most: int = 0) -> tuple[int, ...]:
    """Return the tokens of a dialogue, up to where the model continues; `most` as for `Renderer.encode`.

    Raises:
        PromptTooLong: as for `Renderer.encode`.
        SettingsError: the chat template refuses it.
    """
    text = _written(renderer, dialogue.messages, dialogue.tools)
    return renderer.encode(text, special=not renderer.has_template, most=most)


def added(
    renderer: Renderer, dialogue: Dialogue, first: int, sampled: Sequence[int], most: int = 0
) -> tuple[int, ...]:
    """Return the tokens of a dialogue's messages from `first` on, as they follow an answer.

    The answer before them is not rendered: the template writes the messages after another one, and what it
    writes behind that is cut off there. If the sampled tokens end with the end of the turn, that is not
    repeated.

    Args:
        renderer: has the template.
        dialogue: the request.
        first: index of the first new message; the one before it is the answer.
        sampled: tokens of the answer.
        most: as for `Renderer.encode`.

    Raises:
        PromptTooLong: as for `Renderer.encode`.
        SettingsError: the template cannot write messages after an answer.
    """
    if not renderer.has_template:
        return renderer.encode(renderer.dialogue_text(dialogue.messages[first:]), most=most)
    tail = renderer.encode(_behind_answer(renderer, dialogue, first), most=most)
    return tail[_closing(renderer, tail, sampled) :]


def _closing(renderer: Renderer, tail: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many tokens of `tail` merely close an answer that has ended with the end of its turn.

    They are those up to that end. Some templates write other special tokens before it.
    """
    if not sampled or sampled[-1] not in tail:
        return 0
    if renderer.text((sampled[-1],)) and sampled[-1] not in renderer.stop_token_ids:
        return 0  # it is part of the answer's text
    end = tail.index(sampled[-1])
    return 0 if renderer.text(tuple(tail[:end])).strip() else end + 1


def _behind_answer(renderer: Renderer, dialogue: Dialogue, first: int) -> str:
    """Return the template's text from the end of an answer on."""
    new, answer, tools = dialogue.messages[first:], dialogue.messages[first - 1], dialogue.tools
    mark, result = (
        f"tether{secrets.token_hex(16)}{what}" for what in ("answer", "result")
    )  # in no text of the request
    # Some templates repeat the system's message, or the tools, before the last message of the user.
    before = [*_system(dialogue.messages), {"role": "user", "content": "x"}]
    if calls := answer.get("tool_calls"):
        # Some templates write the result of a tool only after a call of it, or end a call by another token.
        called = {**answer, "content": "", "tool_calls": [_marked(call, mark) for call in calls]}
        try:
            _, mark_found, text = _written(renderer, [*before, called, *new], tools).rpartition(mark)
        except SettingsError:
            mark_found = text = ""  # a template without calls may still write their results, as below
        if mark_found and (ends := [place for stop in _stops(renderer) if (place := text.find(stop)) >= 0]):
            return text[min(ends) :]
    plain = {"role": "assistant", "content": mark}
    results = [{**message, "content": result} for message in new if message["role"] == "tool"]
    if results and result not in _written(renderer, [*before, plain, *results], tools).rpartition(mark)[2]:
        raise SettingsError("the chat template leaves out the result of a tool")
    _, mark_found, text = _written(renderer, [*before, plain, *new], tools).rpartition(mark)
    if not mark_found:
        raise SettingsError("the chat template leaves out an answer that others follow")
    return text


def _written(renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Return messages as the template writes them; some take the arguments of a call only as text."""
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
    """Return a message with the arguments of its calls as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [_with_arguments(call, json.dumps(_arguments(call))) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _arguments(call: dict[str, Any]) -> Any:
    return call["function"]["arguments"]


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _marked(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a call whose only argument is the mark."""
    return _with_arguments(call, {"x": mark})


def _system(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[:1] if messages[0]["role"] == "system" else ()


def _stops(renderer: Renderer) -> list[str]:
    return [text for token in renderer.stop_token_ids if (text := renderer.piece(token))]
