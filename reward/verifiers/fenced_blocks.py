"""Parses fenced code blocks of a response, as in Markdown."""

import re
from collections.abc import Collection

_FENCE = re.compile(
    r"```[^`\n]*```|```([^`\n]*)\n(.*?)```"
    # lines are read once, also without a closing fence: the next line that begins with ~~~ ends the search
    r"|^[ \t]*~{3,}+([^\n]*)\n((?:(?![ \t]*~~~)[^\n]*\n)*+)[ \t]*~{3,}+[ \t\r]*$",
    re.DOTALL | re.MULTILINE,
)
"""Inline code between fences, or a block of ``` or ~~~ with two groups each: info string and content."""


def last_block(response: str, languages: Collection[str]) -> str | None:
    """Return the content of the last block of a language, or without a language; None if there is none.

    Blocks begin and end with ``` or, on lines of their own, with ~~~.

    Args:
        languages: names of the language, in lower case; blocks of other languages are skipped.
    """
    rows = [
        match.group(1, 2) if match[4] is None else match.group(3, 4) for match in _FENCE.finditer(response)
    ]
    blocks = [(info.split(), text) for info, text in rows if text is not None]
    fitting = [text for names, text in blocks if not names or names[0].lower() in languages]
    return fitting[-1] if fitting else None
