"""Tests where an engine process that was forked from a server writes its output."""

import subprocess
import sys
from pathlib import Path

from tests.integration.loop import ROOT

WAIT = "import signal; signal.pause()"
MOVE = (
    "import sys; from rollout.engines.vllm.eager_core import write_where; write_where(int(sys.argv[1])); {}"
)
SPEAK = "print('out', flush=True); print('err', file=sys.stderr)"


def move_to(pid: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", MOVE.format(SPEAK), str(pid)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)


def test_output_goes_to_the_log_of_another_process_behind_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("before\n")
    with (
        path.open("ab") as log,
        subprocess.Popen([sys.executable, "-c", WAIT], stdout=log, stderr=log) as other,
    ):
        moved = move_to(other.pid)
        other.kill()
    assert path.read_text() == "before\nout\nerr\n"
    assert (moved.stdout, moved.stderr) == ("", "")


def test_output_stays_where_it_is_if_the_other_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait(60)
    moved = move_to(other.pid)
    assert (moved.stdout, moved.stderr) == ("out\n", "err\n")
