"""Tests that the output of libraries and their processes does not reach the user's terminal."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.observability.redirect_output import redirect_output

PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from services.observability.redirect_output import redirect_output

logging.basicConfig(stream=sys.stderr)
print("before")
try:
    with redirect_output(Path(sys.argv[1])):
        print("a library")
        logging.error("a logger")
        os.write(1, b"a foreign function\\n")
        command = "read go; echo a process; echo its error >&2"
        child = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE)
        raise ValueError("in the middle")
except ValueError as error:
    print(error)
child.communicate(b"go\\n")
print("after", file=sys.stderr)
"""


def test_only_what_is_printed_outside_of_the_block_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "logs/eval.log"
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (found.stdout, found.stderr) == ("before\nin the middle\n", "after\n")
    said = log.read_text()
    for words in ("a library", "ERROR:root:a logger", "a foreign function", "a process", "its error"):
        assert words in said


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(SettingsError, match=r"logs"), redirect_output(tmp_path / "logs/eval.log"):
        pass
