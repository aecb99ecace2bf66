"""What `tether verify` reads and prints."""

import shutil
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
    assert "note" not in facts


@pytest.mark.parametrize("kind", ["missing", "directory", "loop"])
def test_absent_spool_is_named_and_is_no_violation(kind: str, tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    spool = run_dir / "spool.sqlite"
    spool.unlink()
    if kind == "directory":
        spool.mkdir()
    elif kind == "loop":
        spool.symlink_to(spool)
    said = render_verification(verify_run(run_dir))
    assert said.endswith(f"\nnote: only archived records were compared: there is no file {spool}")
    shutil.rmtree(run_dir / "archive")
    facts = verify_run(run_dir)
    assert (facts["violations"], "records" in facts) == ([], False)
    without = f"\nnote: no records were found to compare: there is no file {spool}"
    assert render_verification(facts).endswith(without)
    (run_dir / "archive").mkdir()
    assert render_verification(verify_run(run_dir)).endswith(without)


def test_recorded_run_has_files_of_the_present_format(tmp_path: Path) -> None:
    assert check_files(recorded_run(tmp_path)).damaged == []


def test_violations_are_counted_and_listed() -> None:
    text = render_verification({"steps": 2, "violations": ["a", "b"]})
    assert text == "steps 2  violations 2\nviolation: a\nviolation: b"
