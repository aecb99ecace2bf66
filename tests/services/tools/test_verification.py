"""What `tether verify` and `tether trace` print of calls."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import SettingsError
from services.tools.verification import render_calls, render_verification, verify_run
from tests.protocol.samples import CALL


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give the directory of a run"):
        verify_run(tmp_path)


def test_calls_have_a_line_each_that_cannot_drive_a_terminal() -> None:
    first, second = render_calls([CALL, replace(CALL, engine="\x1b[2J")]).splitlines()
    assert first.startswith("1970-01-01 00:00:01.000  +0.500 s  call     sample 0  number 1  after 0")
    assert "versions 3,4  engine rollout.0.aabbccdd" in first
    assert "\x1b" not in second


def test_violations_are_counted_and_listed() -> None:
    text = render_verification({"steps": 2, "violations": ["a", "b"]})
    assert text == "steps 2  violations 2\nviolation: a\nviolation: b"
