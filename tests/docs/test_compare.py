"""Tests the form of docs/compare.md: ten faults, eight systems each, and a dated source for each answer."""

import re
from pathlib import Path

from tests.docs.pages import DOCS

SYSTEMS = ["tether", "verl", "slime", "prime-rl", "NeMo RL", "SkyRL", "AReaL", "TRL"]
SOURCE = re.compile(r"\[[^\]]+\]\([^)\s]+\), \d{4}-\d{2}-\d{2}")
NOT_FOUND = re.compile(r"not found \| \d{4}-\d{2}-\d{2}")


def sections() -> list[tuple[str, list[list[str]]]]:
    page = (DOCS / "compare.md").read_text()
    found = []
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        found.append((title, rows[1:]))
    return found


def test_ten_faults_have_an_answer_of_every_system() -> None:
    faults = sections()[:-1]
    assert len(faults) == 10
    for title, rows in faults:
        assert [row[0] for row in rows] == SYSTEMS, title


def test_every_answer_has_a_dated_source_or_says_that_none_was_found() -> None:
    for title, rows in sections()[:-1]:
        for row in rows:
            text = " | ".join(row[1:])
            assert NOT_FOUND.fullmatch(text) or SOURCE.search(row[2]), f"{title}: {row}"


def test_rows_where_tether_is_behind_have_sources_too() -> None:
    title, rows = sections()[-1]
    assert title == "Where tether is behind"
    assert len(rows) >= 5
    assert all(SOURCE.search(row[1]) for row in rows)


def test_sources_within_the_repository_exist() -> None:
    for target in re.findall(r"\]\((?!https)([^)#]+)", (DOCS / "compare.md").read_text()):
        assert (DOCS / Path(target)).resolve().exists(), target
