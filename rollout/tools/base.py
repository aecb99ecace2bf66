"""Defines the interface of tools, and finds a call in the model's text.

A call is a fenced block that names the tool; its result is inserted as another fenced block:

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
    """Answers calls."""

    def opened(self, stack: AsyncExitStack) -> "Tool":
        """Return the tool of one episode, whose end closes the stack. One without state returns itself."""
        return self

    @property
    def kept(self) -> str:
        """State of the tool between calls of its episode, such as files; empty: none."""
        return ""

    def restore(self, text: str, state: str) -> None:  # noqa: B027  most have no state
        """Take over the state after a call of `text`, from an earlier process or from this one."""

    @abstractmethod
    async def run(self, text: str) -> str:
        """Return the answer to a call; the error of a wrong call is an answer, too.

        Cancelling the call ends the processes that it started.

        Raises:
            Exception: the tool itself does not work; the episode fails.
        """


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A fenced block that names a tool."""

    tool: str
    text: str
    """Text between the fences."""


def is_block_name(name: str) -> bool:
    """Return whether a block can name a tool so."""
    return re.fullmatch(r"\w+", name) is not None and name == name.lower()


def find_call(turn: str, tools: Iterable[str]) -> ToolCall | None:
    """Return the last call in a turn of the model, if it has one."""
    known = set(tools)
    calls = [ToolCall(name.lower(), text) for name, text in BLOCK.findall(turn) if name.lower() in known]
    return calls[-1] if calls else None


def as_output(text: str, most: int) -> str:
    """Return the answer of a tool as a fenced block; of more than `most` characters, beginning and end."""
    text = text.strip("\n")
    if len(text) > most:
        head, tail = (most + 1) // 2, most // 2
        text = f"{text[:head]}\n[{len(text) - most} characters left out]\n{text[len(text) - tail :]}"
    return f"```output\n{text}\n```"
