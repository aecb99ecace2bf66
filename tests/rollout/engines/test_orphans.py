"""Tests that engine processes end with their owner and hold the device's lock until then."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout.engines.contract.models import tiny_model
from services.gpu_sharing.device_lock import DeviceLock
from tests.integration.command import until

DEADLINE_S = 30.0


@pytest.fixture
def tmpdir_of_engine() -> Iterator[Path]:
    """Its name is short enough for sockets in it, as pytest's own need not be."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engine_of_a_killed_owner_ends_and_holds_the_device_until_then(
    tmp_path: Path, tmpdir_of_engine: Path, name: str
) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    device = DeviceLock(tmp_path)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.rollout.engines.orphan", name, str(tmp_path / "model")]
    with (tmp_path / "log").open("wb") as log:
        owner = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmpdir_of_engine)},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert owner.stdout is not None
    try:
        # engines log to stdout too: ours is the one line of numbers
        line = next(
            (words for raw in owner.stdout if (words := raw.split()) and all(map(bytes.isdigit, words))), None
        )
        assert line, (tmp_path / "log").read_text()
        processes = [psutil.Process(int(pid)) for pid in line]
        assert processes
        holders = [psutil.Process(pid) for pid in device.holders() if pid != owner.pid]
        assert holders
        assert set(holders) <= set(processes)
        for process in holders:
            process.suspend()  # else they end with their owner, and end each other
        until(
            lambda: all(process.status() == psutil.STATUS_STOPPED for process in holders),
            seconds=DEADLINE_S,
            what="the stop of the engine's processes",
        )
    finally:
        owner.kill()
        owner.stdout.close()
        owner.wait(DEADLINE_S)
    try:
        assert not device.try_acquire(exclusive=True)
        assert set(device.holders()) == {process.pid for process in holders}
    finally:
        for process in holders:
            process.resume()
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    alive = [
        process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    for process in alive:
        process.kill()
    assert not alive
    assert device.try_acquire(exclusive=True)
    device.close()
    assert not list(tmpdir_of_engine.glob("tether-*"))
