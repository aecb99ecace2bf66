"""Finds measured figures of README and docs that no JSON stands behind."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.benchmarks.figures.claims import TABLE, claims, flat
from tests.benchmarks.versions import ROOT

MEASURED = re.compile(r"\bH[12]00s?\b|EPYC|Xeon|[Tt]wo cores|one core|[Mm]easured|\]\([./]*results/")
"""Words of a paragraph whose figures are measurements, not limits or defaults."""
FIGURE = re.compile(
    r"(?<!\w)\d[\d,.]*(?: to \d[\d,.]*)? ?"
    r"(?:ms|us|s|minutes|tokens/s|messages/s|MB/s|KB|MB|GB|%|x|times)(?!\w)"
)


def pages() -> list[Path]:
    """Return README and the pages of docs/ that people write or that are generated."""
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def unsupported(page: Path, supported: Iterable[str]) -> Iterator[str]:
    """Yield each figure with its place, in paragraphs that measure, which no supported text has."""
    texts = [flat(text) for text in supported]
    for paragraph in page.read_text().split("\n\n"):
        if not MEASURED.search(paragraph) or paragraph.startswith("```"):
            continue
        text = flat(paragraph)
        covered = [
            range(start.start(), start.start() + len(known))
            for known in texts
            for start in re.finditer(re.escape(known), text)
        ]
        for match in FIGURE.finditer(text):
            if not any(match.start() in part for part in covered):
                around = text[max(0, match.start() - 40) : match.end() + 20]
                yield f"{page.relative_to(ROOT)}: {match[0]} in ...{around}..."


def supported_texts(page: Path) -> list[str]:
    """Return the texts of a page that a JSON stands behind, and those that results/figures.toml excepts."""
    name = str(page.relative_to(ROOT))
    table = tomllib.loads(TABLE.read_text())
    excepted = [row["text"] for row in table["excepted"] if row["page"] == name]
    return excepted + [text for claim in claims() if claim.page == name for text in claim.texts()]
