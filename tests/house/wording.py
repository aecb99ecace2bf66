"""Rules of language: how a docstring begins, and words that the field has better ones for."""

import re
from collections.abc import Iterator, Mapping

from tests.house.source import House, Violation
from tests.house.tables import LITERARY_WORDS

OPENINGS = ("Of ", "The same")
"""Beginnings of docstrings that refer to another place instead of naming their subject."""
_LOG_EVENT = re.compile(r"[a-z_]+(\.[a-z_]+)+ \w+=%")
"""Log lines: event and field names are an interface, and keep their words."""
_CODE = re.compile(r"`[^`\n]*`")


def docstring_opening(house: House) -> Iterator[Violation]:
    """Find docstrings that begin without naming their subject."""
    for module in house.modules.values():
        for line, text in module.docstrings:
            if text.startswith(OPENINGS):
                yield Violation(
                    module.path, line, "docstring-opening", f"begins with {text.splitlines()[0][:30]!r}"
                )


def literary_word(house: House, words: Mapping[str, str] = LITERARY_WORDS) -> Iterator[Violation]:
    """Find words of the table in docstrings, in strings of more than one word, and in documents.

    Code between backticks is left out: fields and settings keep their names.
    """
    patterns = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in words.items()}
    for path, line, text in _prose(house):
        plain = _CODE.sub(lambda code: " " * len(code.group()), text)
        for pattern, instead in patterns.items():
            for match in pattern.finditer(plain):
                where = line + plain.count("\n", 0, match.start())
                yield Violation(path, where, "literary-word", f"{match.group()!r}: say {instead}")


def _prose(house: House) -> Iterator[tuple[str, int, str]]:
    for module in house.modules.values():
        if module.folder == "tests/house":
            continue
        for line, text in module.docstrings:
            yield module.path, line, text
    for module in house.product.values():
        for line, text in module.strings:
            if re.search(r"\w \w", text) and not _LOG_EVENT.match(text):
                yield module.path, line, text
    for path, text in house.documents.items():
        yield path, 1, text
