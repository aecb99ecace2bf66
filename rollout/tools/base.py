"""Defines the interface of tools, and parses tool calls in the model's text.

A call is a fenced block named after the tool; its result is inserted as another fenced block:

    ```python                    ```output
    print(6 * 7)                 42
    ```                          ```
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w+)[^\S\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class Tool(ABC):
    """Tool that answers calls."""

    def opened(self, stack: AsyncExitStack) -> "Tool":
        """Return the tool for one episode, which ends with `stack`. Stateless tools return themselves."""
        return self

    @property
    def kept(self) -> str:
        """State of the tool between an episode's calls, such as files; empty: none."""
        return ""

    def restore(self, text: str, state: str) -> None:  # noqa: B027  most tools are stateless
        """Restore the state after a call of `text` from this or an earlier process."""

    @abstractmethod
    async def run(self, text: str) -> str:
        """Return the answer to a call; for an invalid call, an error text.

        Cancelling the call ends the processes that it started.

        Raises:
            Exception: the tool itself is broken; the episode fails.
        """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Fenced block that calls a tool."""

    tool: str
    text: str
    """Text between the fences."""


def is_block_name(name: str) -> bool:
    """Return whether a fenced block can use this tool name."""
    return re.fullmatch(r"\w+", name) is not None and name == name.lower()


def find_call(turn: str, tools: Iterable[str]) -> ToolCall | None:
    """Return the last tool call in a model turn, or None."""
    known = set(tools)
    calls = [ToolCall(name.lower(), text) for name, text in BLOCK.findall(turn) if name.lower() in known]
    return calls[-1] if calls else None


def as_output(text: str, limit: int) -> str:
    """Return a tool's answer as a fenced block; beyond `limit` characters, only its start and end."""
    text = text.strip("\n")
    if len(text) > limit:
        head, tail = (limit + 1) // 2, limit // 2
        text = f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"
    return f"```output\n{text}\n```"
