"""Figures in documents, written from the JSON that they come from.

results/figures.toml has a claim for each text with figures: page, JSON, format and paths. A text is right
if the page has what the format makes of the values. A path is `parts/nccl/ms/total`; `[way=ours,gpus=1]` in
it takes the element of a list with these fields, a number the element at that place. `A / B`, `A * B` and
`A - B` compute, where B may be a number.
"""

import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.benchmarks.versions import ROOT

TABLE = ROOT / "results/figures.toml"
OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "/": operator.truediv,
    "*": operator.mul,
    "-": operator.sub,
}


@dataclass(frozen=True, slots=True)
class Claim:
    """Texts of a page that are made of values of a JSON: one, or one for each element of the list `each`."""

    page: str
    file: str
    text: str
    """Format of Python's `str.format`, a field for each value."""
    values: tuple[str, ...]
    each: str = ""

    def texts(self) -> list[str]:
        """Return the texts that the page must have.

        Raises:
            LookupError: the JSON has no such value; names file and path.
        """
        record = _load(self.file)
        chosen = elements(record, self.each) if self.each else [record]
        return [self.text.format(*(value(element, path) for path in self.values)) for element in chosen]

    def missing(self) -> list[str]:
        """Return the texts that the page does not have, whatever its line breaks."""
        page = flat((ROOT / self.page).read_text())
        return [text for text in self.texts() if flat(text) not in page]


def claims() -> list[Claim]:
    """Return all claims of results/figures.toml."""
    return [
        Claim(row["page"], row["file"], row["text"], tuple(row["values"]), row.get("each", ""))
        for row in tomllib.loads(TABLE.read_text())["claim"]
    ]


def flat(text: str) -> str:
    """Return a text with single spaces for its line breaks."""
    return re.sub(r"\s+", " ", text)


def value(record: Any, expression: str) -> Any:
    """Return the value of a path, or of two that are computed with.

    Raises:
        LookupError: there is no such value.
    """
    both = re.fullmatch(r"(.+) ([/*-]) (.+)", expression)
    if not both:
        return find(record, expression)
    left, sign, right = both.groups()
    other = float(right) if re.fullmatch(r"[\d.]+", right) else find(record, right)
    return OPERATORS[sign](find(record, left), other)


def elements(record: Any, path: str) -> list[Any]:
    """Return the elements of a list, those alone that have the fields in brackets at the end of the path.

    Raises:
        LookupError: there is none.
    """
    place, _, fields = path.partition("[")
    found = [element for element in find(record, place) if not fields or _has(element, fields[:-1])]
    if not found:
        raise LookupError(f"{path}: no element")
    return found


def find(record: Any, path: str) -> Any:
    """Return what lies at a path.

    Raises:
        LookupError: names the path and the part of it that is not there.
    """
    found = record
    for part in _parts(path):
        try:
            if part.startswith("["):
                found = next(element for element in found if _has(element, part[1:-1]))
            else:
                found = found[int(part) if isinstance(found, list) else part]
        except (KeyError, IndexError, StopIteration, TypeError, ValueError) as error:
            raise LookupError(f"{path}: no {part}") from error
    return found


def _has(element: Mapping[str, Any], fields: str) -> bool:
    wanted = dict(field.split("=", 1) for field in fields.split(","))
    return all(str(element.get(name)) == text for name, text in wanted.items())


def _parts(path: str) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"\[[^\]]*\]|[^/\[\]]+", path))


@cache
def _load(file: str) -> Any:
    return json.loads((ROOT / "results" / file).read_text())
