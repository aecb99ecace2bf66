"""Tests the process of tracking: what is left is sent at the end, in bounded time, by one process at once."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.settings.load import dump_settings, load_settings, run_settings
from services.tracking.service import open_runs, track_rest
from services.tracking.state import read_state
from tests.integration.command import environment, until
from tests.integration.loop import ROOT
from tests.services.tracking.test_tracked_run import make_steps

# a call that takes minutes, in which no handler of a signal runs
HANGING = """
import hashlib, sys
from protocol.choices import Entry
from services.tracking import registry, service
class Hanging:
    run_id = url = "x"
    def __init__(self, options): pass
    def log(self, points): print("hangs", flush=True); hashlib.pbkdf2_hmac("sha1", b"", b"", 10**9)
    def close(self): pass
sys.modules["hanging"] = sys.modules["__main__"]
registry.TRACKERS["tensorboard"] = Entry("hanging:Hanging")
service.main()
"""


def prepared(run_dir: Path, *overrides: str) -> Path:
    settings = load_settings(None, [f"run.dir={run_dir}", "tracking.kind=tensorboard", *overrides], {})
    dump_settings(settings, run_dir / "settings.json")
    make_steps(settings, range(3))
    return run_dir


def test_a_process_that_still_flushes_is_waited_for(tmp_path: Path) -> None:
    settings = run_settings(prepared(tmp_path))
    before = contextlib.ExitStack()
    before.enter_context(open_runs(settings))
    ending = threading.Timer(0.02, before.close)
    ending.start()
    with open_runs(settings, 60) as runs:
        assert [run.kind for run in runs] == ["tensorboard"]
    ending.join()


def test_rest_of_a_run_is_sent_by_command(tmp_path: Path) -> None:
    settings = run_settings(prepared(tmp_path))
    states = track_rest(settings)
    assert (states["tensorboard"].sent, states["tensorboard"].problem) == (3, "")
    assert track_rest(settings) == states
    with (
        open_runs(settings),
        pytest.raises(SettingsError, match=r"another process tracks .* with tensorboard"),
    ):
        track_rest(settings)


def test_nothing_to_track_is_refused(tmp_path: Path) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}"], {})
    with pytest.raises(SettingsError, match=r"setting tracking\.kind is empty"):
        track_rest(settings)


def test_library_that_hangs_ends_with_the_time_limit(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path, "tracking.flush_s=0.2")
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        cwd=ROOT,
        env=environment(TETHER_CONFIG=str(run_dir / "settings.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "tracking.given_up" in errors
    assert read_state(run_dir, "tensorboard").sent == 0


def test_process_sends_what_is_left_when_it_is_stopped(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path, "tracking.flush_s=600")
    process = subprocess.Popen(
        [sys.executable, "-m", "services.tracking"],
        cwd=ROOT,
        env=environment(TETHER_CONFIG=str(run_dir / "settings.json")),
    )
    until(lambda: read_state(run_dir, "tensorboard").sent == 3, seconds=120, what="the first steps")
    make_steps(run_settings(run_dir), range(3, 5))
    process.terminate()
    assert process.wait(120) == 0
    assert read_state(run_dir, "tensorboard").version == 5
