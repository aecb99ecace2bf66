"""Errors of a program that the user can fix are one line and exit code 2; others stay tracebacks."""

import pytest

from protocol.errors import SettingsError
from rollout.command_line import errors_as_exit_code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SettingsError("a.jsonl:2: no\n  text"), "a.jsonl:2: no text\n"),
        (FileNotFoundError(2, "No such file", "a.jsonl"), "a.jsonl: No such file\n"),
        (OSError("closed"), "closed\n"),
        (RuntimeError("no server"), "no server\n"),
    ],
)
def test_an_error_of_the_user_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @errors_as_exit_code
    def main(arguments: list[str]) -> int:
        raise error

    assert main([]) == 2
    assert capsys.readouterr().err == line


def test_other_errors_and_exit_codes_pass() -> None:
    @errors_as_exit_code
    def main(arguments: list[str]) -> int:
        return int(arguments[0])

    assert main(["7"]) == 7
    with pytest.raises(ValueError, match="'a'"):
        main(["a"])
