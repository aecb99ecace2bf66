"""Rules of documents, on small repositories whose documents are wrong."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.house import documents
from tests.house.source import House, Violation
from tests.house.tables import Constant

Build = Callable[[dict[str, str]], House]


@dataclass(frozen=True)
class Section:
    archive_mb: int = 5


@dataclass(frozen=True)
class Sections:
    trainer: Section = field(default_factory=Section)


def messages(violations: Iterable[Violation]) -> list[str]:
    return [violation.message for violation in violations]


def test_document_path_must_exist(build: Build) -> None:
    text = """See `reward/a.py`, `reward/`, `reward/*.py`, `a.py` and [a](reward/a.py#x), [web](https://x.org/y.py).
See `reward/b.py`, `tests/x/`, `trainer/*.py`, `b.py` and [b](docs/b.md). Add `reward/NAME.py`.
"""
    house = build({"reward/a.py": "", "README.md": text})
    assert messages(documents.document_path(house)) == [
        "there is no reward/b.py",
        "there is no tests/x/",
        "there is no trainer/*.py",
        "there is no docs/b.md",
        "no file is called b.py",
        "the link to docs/b.md is broken",
    ]


def test_docstring_path_begins_at_the_folder_or_the_root(build: Build) -> None:
    text = '"""Sends.\n\n`b.py`, `x/c.lua`, `reward/b.py`, `json.loads`; `c.lua`,\n`trainer/b.py`.\n"""\n'
    house = build({"reward/a.py": text, "reward/b.py": "", "reward/x/c.lua": ""})
    found = list(documents.docstring_path(house))
    assert messages(found) == ["there is no c.lua", "there is no trainer/b.py"]
    assert [(violation.path, violation.line) for violation in found] == [
        ("reward/a.py", 3),
        ("reward/a.py", 4),
    ]


def test_document_name_must_be_in_code_or_settings(build: Build) -> None:
    text = "`trainer.loop`, `trainer.loop.Loop.run`, `trainer.archive_mb`, `BigLoop`, `BigLoop.step()`\n"
    wrong = "`trainer.train`, `trainer.loop.Step`, `trainer.archive_gb`, `SmallLoop`, `BigLoop.stop`\n"
    code = "class Loop: ...\nclass BigLoop:\n    def step(self): ...\n"
    house = build({"trainer/loop.py": code, "README.md": text + wrong})
    found = list(documents.document_name(house, Sections))
    assert [violation.line for violation in found] == [2] * 5
    assert messages(found) == [
        "neither code nor settings have trainer.train",
        "neither code nor settings have trainer.loop.Step",
        "neither code nor settings have trainer.archive_gb",
        "nothing in the code is called SmallLoop",
        "nothing in the code is called stop",
    ]


def test_document_number_must_be_the_constant(build: Build) -> None:
    house = build(
        {"reward/a.py": "KIB = 1 << 10\nKEPT = 16 * KIB\n", "README.md": "the last 16,000 ids; 16 KiB\n"}
    )
    ids = Constant("README.md", r"last ([\d,]+) ids", "reward.a.KEPT")
    size = Constant("README.md", r"(\d+) KiB", "reward.a.KEPT", lambda value: value / 1024)
    absent = Constant("README.md", r"(\d+) GiB", "reward.a.KEPT")
    assert messages(documents.document_number(house, [ids, size, absent])) == [
        "says 16,000, but reward.a.KEPT gives 16384",
        r"does not say '(\\d+) GiB', which tests/house/tables.py compares",
    ]


def test_document_default_must_be_the_default_of_the_setting(build: Build) -> None:
    row = "| `TETHER_A` | `trainer.archive_mb` | size | {} |\n"
    assert (
        messages(documents.document_default(build({"docs/commands.md": row.format("`5`")}), Sections)) == []
    )
    assert messages(documents.document_default(build({"docs/commands.md": row.format(6)}), Sections)) == [
        "trainer.archive_mb is 5 by default, not 6"
    ]


def test_document_length_is_limited(build: Build) -> None:
    house = build({"README.md": "one two three\n"})
    assert messages(documents.document_length(house, {"README.md": 3, "OTHER.md": 1})) == []
    assert messages(documents.document_length(house, {"README.md": 2})) == ["has 3 words; 2 at most"]


def test_prose_of_documents_has_at_most_100_columns(build: Build) -> None:
    wide = "word " * 21
    table, code, fenced = f"| {wide} |", f"`{'x' * 50}` {wide}", f"```\n{wide}\n```"
    house = build({"README.md": f"{wide}\n{table}\n{code}\n{fenced}\n- {wide}\nshort\n"})
    assert [violation.line for violation in documents.document_width(house)] == [1, 7]
