"""Reads conversations of rows, `[{role, content}, ...]`; refuses what a template would not show whole."""

from collections.abc import Mapping
from typing import Any

from protocol.errors import SettingsError

CALLS = ("tool_calls", "function_call")
"""Fields of a message without which what follows it has no meaning, and which a `Prompt` does not have."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
"""Roles of a conversation that some chat template knows; a template drops a message with any other."""


def read_conversation(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Return (role, content) of each message.

    Args:
        value: what a row has for its prompt.
        where: file and line, or data set and row, for errors.

    Raises:
        SettingsError: a chat template would not show it whole, or it is not the model's turn.
    """
    problem = f"{where}: expected text or a list of messages with a role and a content as text"
    if not isinstance(value, list) or not value:
        raise SettingsError(f"{problem}, got {type(value).__name__}")
    pairs = []
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise SettingsError(f"{problem}, got {str(message)[:80]}")
        if called := [field for field in CALLS if message.get(field)]:
            raise SettingsError(
                f"{where}: a message has {called[0]}, which a prompt cannot say; write the calls "
                "into its content, as the model does, or take such rows out of the data"
            )
        if message["role"] not in ROLES:
            raise SettingsError(
                f"{where}: a message has the role {message['role']!r}, which chat templates leave out; "
                f"they know {', '.join(ROLES)}"
            )
        pairs.append((message["role"], message["content"]))
    if pairs[-1][0] == "assistant":
        raise SettingsError(
            f"{where}: the conversation ends with what the assistant said, so the model would be shown an "
            "answer; take that message out, or into the field that prompts.answer_field names"
        )
    return tuple(pairs)
