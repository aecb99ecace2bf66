"""Writes the messages of the benchmark: an agent with tools, and a history that grows."""

from typing import Any

from tests.benchmarks.versions import ROOT

GROUP = 8
"""Samples of a group."""
RESULT_CHARACTERS = 600
"""Length of what a tool returns to the agent, and so of each message that a call adds."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name} to work on the task; it returns text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }
    for name in ("search", "read", "write", "run")
]


def opening(number: int) -> list[dict[str, Any]]:
    """Return the first messages of a session; `GROUP` of them have one prompt."""
    text = (ROOT / "docs/glossary.md").read_text()[:RESULT_CHARACTERS]
    return [
        {"role": "system", "content": f"You are an agent with tools. {text}"},
        {"role": "user", "content": f"Task {number // GROUP}: {text[::-1]}"},
    ]


def following(said: str, turn: int) -> list[dict[str, Any]]:
    """Return what the harness adds after an answer: the answer, and the result of a tool."""
    start = turn * RESULT_CHARACTERS
    text = (ROOT / "docs/engines.md").read_text()[start : start + RESULT_CHARACTERS]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": f"Result {turn}: {text}"}]
