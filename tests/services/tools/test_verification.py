"""What `tether verify` reads and prints."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.run_record.damage import check_files
from services.tools.verification import render_verification, verify_run
from tests.services.monitor.runs import recorded_run


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give the directory of a run"):
        verify_run(tmp_path)


def test_recorded_run_without_sessions_is_verified(tmp_path: Path) -> None:
    facts = verify_run(recorded_run(tmp_path))
    assert (facts["violations"], facts["trained"]) == ([], 21)


def test_recorded_run_has_files_of_the_present_format(tmp_path: Path) -> None:
    assert check_files(recorded_run(tmp_path)).damaged == []


def test_violations_are_counted_and_listed() -> None:
    text = render_verification({"steps": 2, "violations": ["a", "b"]})
    assert text == "steps 2  violations 2\nviolation: a\nviolation: b"
