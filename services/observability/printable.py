"""Makes text from models and users safe to print, so that it cannot control the terminal."""

import re
import unicodedata

ALLOWED = frozenset("\n\t\u200c\u200d")
"""Characters of the categories below that are printed unchanged: they only affect layout."""
ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are escaped: control and format characters (escape sequences, text direction), and
characters that cannot be shown."""


def printable(text: str) -> str:
    r"""Return text in which control characters are written as `\x1b` or `\u202e`; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        _escape(char) if char not in ALLOWED and unicodedata.category(char) in ESCAPED else char
        for char in text
    )


def one_line(text: str) -> str:
    r"""Return text as a single line: line ends and tabs are written as `\x0a` and `\x09`, too."""
    return "".join(_escape(char) if char in "\n\t" else char for char in printable(text))


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without_numbers(text: str) -> str:
    """Replace each number in text by N, so that metric labels and kinds of waits contain no group numbers."""
    return re.sub(r"\d+", "N", text)
