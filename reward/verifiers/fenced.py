"""Finds the fenced block of a response that verifiers read."""

import re
from collections.abc import Collection

_FENCE = re.compile(r"```[^`\n]*```|```([^`\n]*)\n(.*?)```", re.DOTALL)
"""Text between fences within a line, or a block: what is behind its first fence, and its content."""


def last_block(response: str, languages: Collection[str]) -> str | None:
    """Return the content of the last block between ``` fences that names no other language; None: none does.

    Args:
        response: any text.
        languages: names of the language, in lower case.
    """
    blocks = [(found[1].split(), found[2]) for found in _FENCE.finditer(response) if found[2] is not None]
    fitting = [text for names, text in blocks if not names or names[0].lower() in languages]
    return fitting[-1] if fitting else None
