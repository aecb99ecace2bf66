"""The checks after a chaos run: they report what they are for."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.trials.chaos.checks import check_leftovers, trained_twice


def commit(step: int, *groups: int) -> dict[str, Any]:
    return {"event": "commit", "step": step, "groups": {str(group): {} for group in groups}}


def test_a_group_in_two_steps_is_noticed() -> None:
    assert trained_twice([commit(0, 1, 2), commit(1, 3, 2)]) == ["group 2 was trained 2 times"]


def test_a_group_of_an_abandoned_step_may_be_trained_again() -> None:
    rewind = {"event": "resume", "version": 1, "continued": False}
    assert trained_twice([commit(0, 1), commit(1, 2), rewind, commit(1, 2)]) == []
    assert trained_twice([commit(0, 1), commit(1, 2), rewind | {"continued": True}, commit(2, 2)]) == [
        "group 2 was trained 2 times"
    ]


def test_files_and_processes_that_are_left_are_noticed(tmp_path: Path) -> None:
    for name in ("tmp", "run/logs", "run/checkpoints/step_00000003"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("run/audit.jsonl", "run/logs/rollout.1.log", "run/checkpoints/step_00000003/manifest.json"):
        (tmp_path / name).touch()
    before = check_leftovers(tmp_path, tmp_path / "run", [])
    for name in ("tmp/x", "run/spool.sqlite-wal", "run/checkpoints/step_00000003/manifest.json.tmp"):
        (tmp_path / name).touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = set(check_leftovers(tmp_path, tmp_path / "run", [Path("/dev/shm/tether-x")])) - set(before)
        assert process.stdin is not None
        process.stdin.close()
    assert after == {
        f"process {process.pid} is left: {sys.executable} -c input()", "/dev/shm/tether-x is left",
        f"{tmp_path}/tmp/x is left",
        "spool.sqlite-wal is left in the run directory",
        "checkpoints/step_00000003/manifest.json.tmp is left in the run directory",
    }  # fmt: skip
