"""Rules of language, on small repositories that break them."""

from collections.abc import Callable

import pytest

from tests.house import wording
from tests.house.source import House

Build = Callable[[dict[str, str]], House]


@pytest.mark.parametrize("opening", ["Of the weights.", "The same for people."])
def test_docstring_opening_names_no_subject(build: Build, opening: str) -> None:
    text = (
        f'"""Sums."""\nclass A:\n    """Holds sums."""\n    x: int\n    """{opening}"""\n    y = "Of all"\n'
    )
    assert [violation.line for violation in wording.docstring_opening(build({"reward/a.py": text}))] == [5]


def test_literary_word_is_found_in_prose_alone(build: Build) -> None:
    text = '''"""Sums.

It goes on, `gone` is a name.
"""
def f(x):
    """Return what is gone."""
    state = "gone"
    raise ValueError(f"the peer {x} is gone")
'''
    house = build(
        {"reward/a.py": text, "tests/b.py": 'x = "it is gone"\n', "docs/c.md": "```sh\n```\nis gone\n"}
    )
    found = wording.literary_word(house, {"gone": "removed", "goes on": "continues"})
    assert sorted((violation.path, violation.line) for violation in found) == [
        ("docs/c.md", 3),
        ("reward/a.py", 3),
        ("reward/a.py", 6),
        ("reward/a.py", 8),
    ]


def test_literary_word_is_told_with_a_better_one(build: Build) -> None:
    (violation,) = wording.literary_word(build({"README.md": "It is Gone.\n"}), {"gone": "removed"})
    assert str(violation) == "README.md:1 literary-word: 'Gone': say removed"
