"""The exit code of several ranks says what `tether up` has to know of one process."""

import signal

import pytest

from services.trainer.start_ranks import exit_code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({1}, 1),
        ({1, 2, 3}, 2),
        ({-signal.SIGTERM, 3}, 3),
        ({1, -signal.SIGKILL}, 137),
    ],
)
def test_a_wrong_setting_comes_before_an_absent_ledger_and_a_signal(codes: set[int], code: int) -> None:
    assert exit_code(codes) == code
