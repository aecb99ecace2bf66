"""Validates conversations `[{role, content}, ...]`; rejects messages that chat templates would drop."""

from collections.abc import Mapping
from typing import Any

from protocol.errors import SettingsError

CALLS = ("tool_calls", "function_call")
"""Message fields that a `Prompt` cannot represent, but that later messages refer to."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
"""Roles that some chat template renders; templates drop messages with other roles."""


def read_conversation(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Return (role, content) of each message.

    Args:
        value: prompt value of a row.
        where: file and line, or data set and row, for errors.

    Raises:
        SettingsError: a chat template would drop a part of the conversation, or the last message is the
            assistant's.
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
