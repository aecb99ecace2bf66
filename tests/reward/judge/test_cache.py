"""Tests the file of answers: bounded, shared, and refused where it cannot be."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from reward.judge.cache import AnswerCache


def test_the_newest_answers_are_kept_by_all_who_share_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "cache")
    first, second = AnswerCache(path, 3), AnswerCache(path, 3)
    for number in range(5):
        (first, second)[number % 2].put(b"%d" % number, f"answer {number}")
    first.put(b"4", "another")
    assert [second.get(b"%d" % number) for number in range(5)] == [None, None, None, "answer 3", "another"]
    first.close()
    second.close()


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no database" * 1000)
    with pytest.raises(SettingsError, match=r"option cache: .*/cache: file is not a database"):
        AnswerCache(str(tmp_path / "cache"), 3)
