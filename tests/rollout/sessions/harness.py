"""A random harness: what it does to its messages, and what the model answers to it."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from rollout.sessions.session import CallAnswer
from tests.rollout.sessions.chats import renderer

CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "continue", "continue", "tool", "tool", "again", "at once", "edit", "compact", "other tools",
                "forget", "sub-agent", "strip thoughts",
            ]
        ),
        st.text(alphabet="abc the\n<>/", max_size=8),
        st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
        st.sampled_from(["text", "thought", "call", "calls"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)  # fmt: skip
"""What each request has: what is done, a text, tokens, the kind of the answer, whether its turn ends."""


def said_tokens(name: str, drawn: Sequence[int], kind: str, ends: bool) -> tuple[int, ...]:
    """What its kind begins with, and random tokens, whose text would be tokenized otherwise."""
    text = renderer(name)
    before = {"text": "", "thought": "<think>ab</think>", "call": CALL_TEXT, "calls": CALL_TEXT + CALL_TEXT}
    words = tuple(i % 256 for i in drawn) if kind in ("text", "thought") else ()
    return (*text.encode(before[kind]), *words, *((text.stop_token_ids[0],) if ends else ()))


def rewritten(messages: list[dict[str, Any]], action: str, words: str) -> list[dict[str, Any]]:
    """What a harness makes of its messages before it asks."""
    if action == "edit" and len(messages) > 1:
        return [*messages[:-2], {**messages[-2], "content": words, "tool_calls": None}, messages[-1]]
    if action == "compact":
        return [{"role": "user", "content": f"so far: {words}"}]
    if action == "strip thoughts":
        return [{**m, "content": (m.get("content") or "").split("</think>")[-1]} for m in messages]
    return messages[-1:] if action == "forget" else messages


def reply(answer: CallAnswer, action: str, words: str) -> list[dict[str, Any]]:
    """An answer and what a harness says to it: results of its calls, the last one first, or a user's text."""
    calls = answer.message.get("tool_calls") or []
    if action == "tool" and calls:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": words} for call in calls]
        return [answer.message, *results[::-1]]
    return [answer.message, {"role": "user", "content": words}]
