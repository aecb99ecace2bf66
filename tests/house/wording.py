"""Rules of language: how a docstring begins, and words that the field has better ones for."""

import ast
import re
from collections.abc import Iterator, Mapping

from tests.house.source import House, Module, Violation
from tests.house.tables import EVASIONS, LITERARY_WORDS, MOST_CLAUSE_CLASSES, MOST_OF_NAMES

OPENINGS = ("Of ", "The same")
"""Beginnings of docstrings that refer to another place instead of naming their subject."""
_LOG_EVENT = re.compile(r"[a-z_]+(\.[a-z_]+)+ \w+=%")
"""Log lines: event and field names are an interface, and keep their words."""
_WORD = re.compile(r"\w[\w'-]*")
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


def evasion(house: House, most: Mapping[str, float] = EVASIONS) -> Iterator[Violation]:
    """Find constructions that the product's docstrings and comments use more often than the table allows.

    The last place is named, with the share per 10,000 words.
    """
    texts = [
        (module.path, line, text)
        for module in house.product.values()
        for line, text in (*module.docstrings, *module.comments)
    ]
    words = sum(len(_WORD.findall(text)) for _, _, text in texts)
    for construction, allowed in most.items():
        pattern = re.compile(rf"\b(?:{construction})\b", re.IGNORECASE)
        places = [
            (path, line + text.count("\n", 0, match.start()))
            for path, line, text in texts
            for match in pattern.finditer(text)
        ]
        share = len(places) / max(words, 1) * 10_000
        if share > allowed:
            yield Violation(
                *places[-1],
                "evasion",
                f"{construction!r}: {share:.1f} per 10,000 words, at most {allowed}: name the noun",
            )


def of_name(house: House, most: int = MOST_OF_NAMES) -> Iterator[Violation]:
    """Find functions, parameters and variables called `of_x`, where the product has more than `most`."""
    places = [
        Violation(module.path, line, "of-name", f"{name}: say the noun first")
        for module in house.product.values()
        for line, name in _bound_names(module)
        if re.match(r"_?of_\w", name)
    ]
    if len(places) > most:
        yield from places


def class_clause(house: House, most: int = MOST_CLAUSE_CLASSES) -> Iterator[Violation]:
    """Find class docstrings that begin with a clause, where the product has more than `most`."""
    places = [
        Violation(module.path, node.lineno, "class-clause", f"{node.name}: begin with a noun")
        for module in house.product.values()
        for node in module.classes()
        if re.match(r"(?:what|how|where|which)\b", ast.get_docstring(node) or "", re.IGNORECASE)
    ]
    if len(places) > most:
        yield from places


def _bound_names(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield node.lineno, name
            case ast.AsyncFunctionDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


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
