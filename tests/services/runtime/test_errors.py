"""Log lines: nobody who wrote an argument can forge one, or drive the terminal."""

import io
import logging

import pytest

from protocol.errors import SettingsError, SpoolError, TetherError
from services.runtime.errors import (
    EXIT_FAILED,
    EXIT_SETTINGS,
    MAX_LINE_CHARACTERS,
    LineFormatter,
    describe_error,
    end_command,
)

FORGED = "evil\n12:00:00 ingest E forged.line \x1b[31m\u2028x\r"


@pytest.fixture
def lines() -> tuple[logging.Logger, io.StringIO]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("ingest %(levelname).1s %(message)s"))
    logger = logging.Logger("forged")
    logger.addHandler(handler)
    return logger, out


def test_arguments_stay_on_their_line(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, out = lines
    logger.warning("bus.refused message=%s", FORGED)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("ingest W bus.refused message=evil\\x0a12:00:00 ingest E forged.line \\x1b[31m")


@pytest.mark.parametrize("char", ["x", "\x1b"])
def test_a_line_has_a_length_whatever_a_peer_says(
    lines: tuple[logging.Logger, io.StringIO], char: str
) -> None:
    log, out = lines
    long = char * 10**5
    try:
        raise ValueError(f"{long}\n{long}")
    except ValueError as error:
        log.warning("score.failed error=%s", long, exc_info=True, stack_info=True)
        said = [*out.getvalue().splitlines(), describe_error(error)[0]]
    assert max(map(len, said)) < MAX_LINE_CHARACTERS + 100
    assert said[0].endswith(" ... (of 100019 characters)")
    assert sum(" ... (of " in line for line in said) == 4


def test_lines_of_a_traceback_look_like_no_record(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, out = lines
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("process.failed")
    first, *others = out.getvalue().splitlines()
    assert first == "ingest E process.failed"
    assert len(others) > 3
    assert all(line.startswith("    ") for line in others)
    assert "\x1b" not in out.getvalue()


def test_an_error_is_described_in_one_line() -> None:
    for error, code in ((SettingsError(FORGED), EXIT_SETTINGS), (RuntimeError(FORGED), EXIT_FAILED)):
        line, found = describe_error(ExceptionGroup("", [error]))
        assert (len(line.splitlines()), found) == (1, code)
    assert describe_error(TetherError("the run halted")) == ("the run halted", EXIT_FAILED)
    assert describe_error(KeyError("x")) == ("KeyError: 'x'", EXIT_FAILED)


def test_a_command_that_cannot_read_a_file_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    spool, absent = SpoolError("spool x is empty"), FileNotFoundError(2, "No such file", "x")
    for error in (spool, ExceptionGroup("", [spool]), absent):
        with pytest.raises(SystemExit) as ended:
            end_command(error)
        assert ended.value.code == EXIT_SETTINGS
    assert capsys.readouterr().err == 2 * "tether: spool x is empty\n" + "tether: x: No such file\n"
    assert describe_error(spool)[1] == EXIT_FAILED, "to a service, which tries again"
    with pytest.raises(OSError, match="nameless"):
        end_command(OSError("nameless"))
