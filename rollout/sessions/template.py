"""Writes requests as tokens: a whole dialogue, or only the messages after an answer that keeps its tokens."""

import secrets
from collections.abc import Sequence
from typing import Any

from protocol.errors import SettingsError
from rollout.render import Renderer
from rollout.sessions.messages import Dialogue, Message


def whole(renderer: Renderer, dialogue: Dialogue) -> tuple[int, ...]:
    """Return the tokens of a dialogue, up to where the model continues.

    Raises:
        SettingsError: the chat template refuses it.
    """
    text = renderer.dialogue_text(dialogue.messages, dialogue.tools)
    return renderer.encode(text, special=not renderer.has_template)


def added(renderer: Renderer, dialogue: Dialogue, first: int, sampled: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a dialogue's messages from `first` on, as they follow an answer.

    The answer before them is not rendered: the template writes the messages after another one, and what it
    writes behind that is cut off there. If the sampled tokens end with the end of the turn, that is not
    repeated.

    Args:
        renderer: has the template.
        dialogue: the request.
        first: index of the first new message; the one before it is the answer.
        sampled: tokens of the answer.

    Raises:
        SettingsError: the template cannot write messages after an answer.
    """
    new, answer = dialogue.messages[first:], dialogue.messages[first - 1]
    if not renderer.has_template:
        return renderer.encode(renderer.dialogue_text(new))
    mark = f"tether{secrets.token_hex(16)}answer"  # in no text of the request
    tail = renderer.encode(_behind_answer(renderer, mark, answer, new, dialogue.tools))
    return tail[1:] if sampled and tail and sampled[-1] == tail[0] else tail


def _behind_answer(
    renderer: Renderer, mark: str, answer: Message, new: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> str:
    """Return what the template writes from the end of an answer on."""
    question = {"role": "user", "content": "x"}
    if new and new[0]["role"] == "tool" and answer.get("tool_calls"):
        # Some templates write the result of a tool only after a call of it.
        called = {
            **answer,
            "content": "",
            "tool_calls": [_marked(call, mark) for call in answer["tool_calls"]],
        }
        try:
            text = renderer.dialogue_text([question, called, *new], tools).rpartition(mark)[2]
            if ends := [place for stop in _stops(renderer) if (place := text.find(stop)) >= 0]:
                return text[min(ends) :]
        except SettingsError:
            pass  # a template without calls may still write their results, as below
    plain = {"role": "assistant", "content": mark}
    _, found, text = renderer.dialogue_text([question, plain, *new], tools).rpartition(mark)
    if not found:
        raise SettingsError("the chat template leaves out an answer that others follow")
    return text


def _marked(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a call whose only argument is the mark."""
    return {**call, "function": {**call["function"], "arguments": {"x": mark}}}


def _stops(renderer: Renderer) -> list[str]:
    return [text for token in renderer.stop_token_ids if (text := renderer.piece(token))]
