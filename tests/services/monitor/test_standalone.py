"""`tether monitor D`: the page of a run that is over, until Ctrl-C."""

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.services.monitor.runs import recorded_run


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", "monitor", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_monitor_serves_a_finished_run_until_ctrl_c(tmp_path: Path) -> None:
    with start(str(recorded_run(tmp_path))) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"page (http://127\.0\.0\.1:\d+/)  \(Ctrl-C ends it\)\n", line)
        assert found, line + process.stderr.read()
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            assert "<title>tether</title>" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with start(str(tmp_path)) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.startswith(f"tether: no run in {tmp_path}")
