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


def test_evasion_is_counted_in_docstrings_and_comments_of_the_product(build: Build) -> None:
    text = '''"""Sums of the rows, those of the last step."""
# that
# of is not counted across lines, That of is
x = "that of"
'''
    house = build({"reward/a.py": text, "tests/b.py": "# that of\n"})
    (violation,) = wording.evasion(house, {"that of|those of": 1052, "which": 0})
    assert (violation.path, violation.line) == ("reward/a.py", 3)
    assert "1052.6 per 10,000 words" in violation.message
    assert not list(wording.evasion(house, {"that of|those of": 1053}))


def test_of_name_is_found_wherever_it_is_bound(build: Build) -> None:
    text = "def of_a(of_b):\n    for of_c in of_b:\n        of_c.of_d = offset = of_e\n"
    house = build({"reward/a.py": text, "tests/b.py": "of_f = 1\n"})
    found = [violation.message.partition(":")[0] for violation in wording.of_name(house, 3)]
    assert sorted(found) == ["of_a", "of_b", "of_c", "of_d"]
    assert not list(wording.of_name(house, 4))


def test_class_clause_begins_with_no_noun(build: Build) -> None:
    text = 'class A:\n    """What it holds."""\nclass B:\n    """Whatever."""\ndef how():\n    """How."""\n'
    house = build({"reward/a.py": text})
    assert [violation.line for violation in wording.class_clause(house, 0)] == [1]
    assert not list(wording.class_clause(house, 1))
