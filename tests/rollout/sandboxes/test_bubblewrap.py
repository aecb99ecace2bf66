"""The provider `bubblewrap` keeps the promises of a sandbox, and has an endpoint and nothing else."""

import os
import platform
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rollout.config import SandboxConfig
from rollout.sandboxes import bubblewrap
from rollout.sandboxes.base import SandboxCommand
from rollout.sandboxes.bubblewrap import BubblewrapProvider
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.served import INSIDE
from tests.changes import slow_unless_changed
from tests.contracts.host_sandbox_suite import HostSandboxContract
from tests.contracts.sandbox_suite import CONFIG, OUTPUT, START, shell

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed(
        "rollout/sandboxes/",
        "reward/sandbox/",
        "tests/contracts/sandbox_suite.py",
        "tests/contracts/host_sandbox_suite.py",
    ),
]


def made(config: SandboxConfig) -> BubblewrapProvider:
    return BubblewrapProvider(config)


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BubblewrapProvider:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return BubblewrapProvider(CONFIG)


class TestBubblewrap(HostSandboxContract):
    made = f"{__name__}:made"

    def running(self, folder: str) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if mark_of(process) == folder]


def mark_of(process: psutil.Process) -> str:
    """Return the name of the folder of the sandbox that a process is in; empty: of none, or it has ended."""
    try:
        return process.environ().get("TETHER_PROGRAM", "")
    except psutil.Error:
        return ""


SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for number in range({count}):
    place = libc.shmat(libc.shmget(0, 60 << 20, 0o1600), None, 0)
    ctypes.memset(place, 1, 60 << 20)
    libc.shmdt(ctypes.c_void_p(place))
print("held", flush=True)
import time; time.sleep({sleep_s})
"""


async def test_memory_that_no_process_holds_is_counted_or_refused(provider: BubblewrapProvider) -> None:
    async with SandboxPool(provider, 1).leased(START) as sandbox:
        for _ in range(2):  # what a command leaves is removed
            order = ("python3", "-c", SEGMENTS.format(count=2, sleep_s=0))
            found = await sandbox.exec(SandboxCommand(order, 60, OUTPUT))
            assert (found.output, found.ended) == (b"held\n", "")
        order = ("python3", "-c", SEGMENTS.format(count=5, sleep_s=1000))
        assert (await sandbox.exec(SandboxCommand(order, 60, OUTPUT))).ended == "memory"
        order = ("python3", "-c", "import os; os.memfd_create('a')")
        found = await sandbox.exec(SandboxCommand(order, 60, OUTPUT))
        assert (b"Function not implemented" in found.output) == (platform.machine() == "x86_64")


async def test_files_of_both_directories_are_counted(
    provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "INSIDE", INSIDE.replace("MAX_FILES = 1 << 16", "MAX_FILES = 100"))
    for folder in (".", "/tmp"):
        async with SandboxPool(provider, 1).leased(START) as sandbox:
            found = await shell(sandbox, f"cd {folder}; for i in $(seq 200); do : > $i; done; sleep 1000")
            assert found.ended == "files"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_an_ordinary_user_has_the_same_sandboxes() -> None:
    """Run all of these tests as a user without rights, by a Python that it can read."""
    nobody = pwd.getpwnam("nobody").pw_uid
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, nobody, -1)
        known = {"HOME": folder, "TMPDIR": folder, "PATH": os.environ["PATH"]}
        variables = {**known, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
        for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
            ended = subprocess.run(
                ["env", python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow or not slow", __file__],
                cwd=Path(__file__).parents[3], env=variables, user=nobody, group=nobody, extra_groups=[],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if "passed" in ended.stdout:
                break
        assert ended.returncode == 0, ended.stdout + ended.stderr
