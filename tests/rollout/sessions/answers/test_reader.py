"""Thoughts and calls of answers, read by our own syntaxes."""

import pytest

from protocol.errors import SettingsError
from rollout.sessions.answers.reader import AnswerReader, ReadAnswer
from rollout.sessions.answers.tool_calls import PARSERS
from tests.rollout.sessions.chats import renderer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NO_NUMBER = '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": 1e999}}</tool_call>'
NO_TEXT = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'
"""Half of a surrogate pair, which no tokenizer takes when it comes back."""


@pytest.mark.parametrize(
    ("said", "before", "found"),
    [
        (f"<think>\nhm\n</think>\n\nso {CALL}", "", ReadAnswer("so", "hm", (("add", {"a": 1}),))),
        ("hm</think>42", "assistant\n<think>\n", ReadAnswer("42", "hm")),
        ("hm</think>42", "", ReadAnswer("42", "hm")),
        ("hm", "<think>\n", ReadAnswer("", "hm")),
        ("<think>hm", "", ReadAnswer("", "hm")),
        ("no thoughts", "", ReadAnswer("no thoughts")),
        (f"<think>{CALL}</think>no", "", ReadAnswer("no", CALL)),
        (NO_TEXT, "", ReadAnswer(NO_TEXT)),
        (NO_NUMBER, "", ReadAnswer(NO_NUMBER)),
        (f"{CALL} then {CALL}", "", ReadAnswer("then", "", (("add", {"a": 1}), ("add", {"a": 1})))),
        (f"<tool_call> \n{CALL[11:]}", "", ReadAnswer("", "", (("add", {"a": 1}),))),
        (f"{CALL}<tool_call>", "", ReadAnswer("<tool_call>", "", (("add", {"a": 1}),))),
        ("<think></think><tool_call>{broken</tool_call>", "", ReadAnswer("<tool_call>{broken</tool_call>")),
    ],
)
async def test_thoughts_are_what_stands_between_the_tags(said: str, before: str, found: ReadAnswer) -> None:
    text = renderer("tool use")
    reader = AnswerReader("hermes", "think")
    assert await reader.read(text, text.encode(said), text.encode(before), [TOOL]) == found


@pytest.mark.parametrize("text", ["<tool_call>" + "\n" * 100_000, "<tool_call>x" * 20_000 + " " * 100_000])
def test_tags_that_nothing_closes_are_text(text: str) -> None:
    """With a lazy expression this takes hours, in which the rollout worker does nothing else."""
    assert PARSERS["hermes"](text) == (text, [])


async def test_without_tools_no_calls_are_read() -> None:
    text = renderer("tool use")
    assert await AnswerReader().read(text, text.encode(CALL), (), []) == ReadAnswer(CALL)


@pytest.mark.parametrize(
    ("tools", "thoughts", "why"),
    [
        ("hermess", "none", "did you mean 'hermes'"),
        ("hermes", "thinking", "reasoning_syntax"),
        ("vlm:hermes", "none", "did you mean 'vllm'"),
        ("vllm:", "none", "names no parser"),
        ("vllm:hermes", "sglang:qwen3", "another engine"),
    ],
)
def test_a_syntax_that_is_unknown_is_named(tools: str, thoughts: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        AnswerReader(tools, thoughts)
