"""Parses fenced code blocks of a response, as in Markdown."""

import re
from collections.abc import Collection

_FENCE = re.compile(r"```[^`\n]*```|```([^`\n]*)\n(.*?)```", re.DOTALL)
"""Inline code between fences, or a block with two groups: info string and content."""


def last_block(response: str, languages: Collection[str]) -> str | None:
    """Return the content of the last ``` block of a language, or without a language; None if there is none.

    Args:
        languages: names of the language, in lower case; blocks of other languages are skipped.
    """
    blocks = [(match[1].split(), match[2]) for match in _FENCE.finditer(response) if match[2] is not None]
    fitting = [text for names, text in blocks if not names or names[0].lower() in languages]
    return fitting[-1] if fitting else None
