"""Calls of tools in the text of a model."""

import pytest

from rollout.tools.base import ToolCall, as_output, find_call


@pytest.mark.parametrize(
    ("turn", "call"),
    [
        ("I compute.\n```python\nprint(1)\n```\n", ToolCall("python", "print(1)\n")),
        ("```python\na\n```\nthen\n```search\nb\n```", ToolCall("search", "b\n")),
        ("```Python\na\n```", ToolCall("python", "a\n")),
        ("```python\n```", ToolCall("python", "")),
        ("```output\n3\n```", None),
        ("```\na\n```", None),
        ("```python\nnot closed", None),
        ("say ```python\na\n```", None),
        ("", None),
    ],
)
def test_the_last_block_that_names_a_tool_is_the_call(turn: str, call: ToolCall | None) -> None:
    assert find_call(turn, ["python", "search"]) == call


def test_output_that_is_too_long_loses_its_middle() -> None:
    assert as_output("\n  a\nb\n\n", 10) == "```output\n  a\nb\n```"
    assert as_output("abcdefgh", 3) == "```output\nab\n[5 characters left out]\nh\n```"
    assert as_output("abcdefgh", 1) == "```output\na\n[7 characters left out]\n\n```"
