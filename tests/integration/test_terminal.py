"""Runs `tether up` in a pseudo-terminal: the live view, tracking beside it, and Ctrl-C twice."""

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl
from pathlib import Path

import pytest

from services.run_record.steps import read_steps
from services.tracking.state import read_state
from tests.changes import LAUNCHER, slow_unless_changed
from tests.contracts.tracker_suite import read_tensorboard
from tests.integration.command import environment, processes_of, tether_here, until
from tests.integration.loop import ROOT

GENERATES = re.compile(r"rollout\.0 +generates \d+ groups?")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen:
    """A terminal of 110 columns with a program in it, and everything that the program wrote."""

    def __init__(self, *command: str) -> None:
        self._terminal, inside = pty.openpty()
        ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(TERM="xterm-256color", COLUMNS="110"),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal to its programs
        )
        os.close(inside)
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 1 << 16):
                self._written += data
        except OSError:  # the last program has closed the terminal
            return

    def press_ctrl_c(self) -> None:
        """What the key does: a signal to every process of the terminal's foreground group."""
        os.write(self._terminal, b"\x03")

    def text(self) -> str:
        """What was written so far, without escape sequences."""
        return ESCAPE.sub("", self._written.decode(errors="replace"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._reader.join(30)
        os.close(self._terminal)


@slow_unless_changed(*LAUNCHER, "services/run_record/", "services/observability/", "services/tracking/")
@pytest.mark.xdist_group("command")
def test_terminal_shows_a_run_and_stops_it_at_once_at_the_second_ctrl_c(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = (
        "run.name=terminaltest", "tracking.kind=tensorboard", "engine.straggler_factor=100000.0",
        "engine.straggler_share=0.2", "bound.max_staleness=2", "rollout.drain_s=600",
    )  # fmt: skip
    options = [word for override in overrides for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/stragglers.toml")
    screen = Screen(sys.executable, "-m", "services.cli", "up", config, "--run-dir", str(run_dir), *options)
    try:
        shown = until(
            lambda: text if "ETA" in (text := screen.text()) and GENERATES.search(text) else None,
            seconds=300,
            what="a view with the remaining time and what the engine does",
        )
        until(lambda: read_state(run_dir, "tensorboard").version >= 1, seconds=300, what="a tracked step")
        screen.press_ctrl_c()
        until(lambda: "draining: finishing" in screen.text(), seconds=60, what="the line about draining")
        assert screen.process.poll() is None
        screen.press_ctrl_c()
        code = screen.process.wait(120)  # far below the 600 s of draining
    finally:
        screen.close()
    said = screen.text()
    assert code == 0, said
    assert re.search(r"terminaltest running {2}E=2 B=8 mask", shown)
    assert "draining: finishing what is in flight; Ctrl-C again to stop now" in said
    assert "stopping now: all processes are killed" in said
    assert "stopped at version" in said
    assert "Traceback" not in said
    assert processes_of(run_dir) == []
    steps = read_steps(run_dir / "metrics.jsonl")
    sent = read_state(run_dir, "tensorboard").version
    rewards = dict(read_tensorboard(run_dir / "tracking/tensorboard", "")["train/reward_mean"])
    assert set(rewards) >= set(range(1, sent + 1))
    assert all(rewards[step["version"]] == pytest.approx(step["reward_mean"]) for step in steps[:sent])
    status = tether_here("status", run_dir)
    assert (status.returncode, status.stderr) == (0, "")
    assert status.stdout.startswith(f"run terminaltest was stopped at version {len(steps)} of 30, ")
    samples = tether_here("samples", run_dir, "--step", 0, "--limit", 1)
    assert (samples.returncode, samples.stderr) == (0, "")
    assert "step 0\n  prompt | " in samples.stdout
