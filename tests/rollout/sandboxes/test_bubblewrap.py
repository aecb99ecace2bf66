"""The provider `bubblewrap` keeps the promises of a sandbox, and has an endpoint and nothing else."""

import os
import platform
import pwd
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from protocol.errors import SettingsError
from rollout.programs.folder import programs_directory
from rollout.sandboxes import bubblewrap
from rollout.sandboxes.base import SandboxCommand, SandboxDied, Start
from rollout.sandboxes.bubblewrap import BubblewrapProvider
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.served import INSIDE
from tests.changes import slow_unless_changed
from tests.contracts.sandbox_suite import CONFIG, OUTPUT, START, SandboxContract, shell

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed("rollout/sandboxes/", "reward/sandbox/", "tests/contracts/sandbox_suite.py"),
]

ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BubblewrapProvider:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return BubblewrapProvider(CONFIG)


class TestBubblewrap(SandboxContract):
    pass


async def test_it_reaches_its_endpoint_under_the_same_url_and_nothing_else(
    provider: BubblewrapProvider,
) -> None:
    app = web.Application()

    async def said(request: web.Request) -> web.Response:
        return web.Response(text="s" * 200_000)

    app.router.add_get("/s/key/v1", said)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    other = web.TCPSite(runner, "127.0.0.1", 0)
    await other.start()
    try:
        async with SandboxPool(provider, 1).leased(Start(300, endpoint=url)) as sandbox:
            for _ in range(2):
                found = await sandbox.exec(
                    SandboxCommand(("python3", "-c", ASK, f"{url}/s/key/v1"), 60, 1 << 20)
                )
                assert (found.output, found.status) == (b"s" * 200_000 + b"\n", 0)
            elsewhere = f"http://127.0.0.1:{runner.addresses[1][1]}/s/key/v1"
            assert (
                await sandbox.exec(SandboxCommand(("python3", "-c", ASK, elsewhere), 60, OUTPUT))
            ).status == 1
    finally:
        await runner.cleanup()


async def test_an_endpoint_on_another_host_is_refused(provider: BubblewrapProvider) -> None:
    with pytest.raises(SettingsError, match=r"on loopback, not rollout\.example"):
        await provider.start(Start(10, endpoint="https://rollout.example:8000"))


async def test_a_sandbox_that_was_killed_says_so_and_another_one_starts(provider: BubblewrapProvider) -> None:
    pool = SandboxPool(provider, 1)
    async with pool.leased(START) as sandbox:
        [child] = [child for child in psutil.Process().children() if child.name() == "bwrap"]
        child.kill()
        with pytest.raises(SandboxDied, match="the sandbox has ended"):
            await shell(sandbox, "echo 1")
    async with pool.leased(START) as later:
        assert (await shell(later, "echo 1")).output == b"1\n"


async def test_it_ends_with_its_lease(provider: BubblewrapProvider) -> None:
    async with SandboxPool(provider, 1).leased(Start(lease_s=1)) as sandbox:
        with pytest.raises(SandboxDied):
            await shell(sandbox, "sleep 10000", 10_000.0)


KILLED = """
import asyncio, os, signal, tempfile
tempfile.tempdir = {folder!r}
from rollout.sandboxes.bubblewrap import BubblewrapProvider
from tests.contracts.sandbox_suite import CONFIG, START
async def main():
    sandbox = await BubblewrapProvider(CONFIG).start(START)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_a_killed_worker_takes_its_sandboxes_with_it_and_the_next_one_removes_the_rest(
    provider: BubblewrapProvider, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], check=False)
    left = list(programs_directory().iterdir())
    assert len(left) == 1
    async with SandboxPool(provider, 1).leased(START) as sandbox:
        assert left[0] not in programs_directory().iterdir()
        await shell(sandbox, "true")
    assert list(programs_directory().iterdir()) == []
    mark = f"TETHER_PROGRAM={left[0].name}".encode()
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert mark not in process.read_bytes()
        except OSError:
            continue


async def test_the_worker_s_environment_is_not_in_it(
    provider: BubblewrapProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_SECRET_TEST", "credentials")
    async with SandboxPool(provider, 1).leased(START) as sandbox:
        assert b"credentials" not in (await shell(sandbox, "env; cat /proc/*/environ")).output


async def test_a_large_snapshot_has_the_processor_time_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = replace(CONFIG, cpu_s=1, disk_mb=64, memory_mb=1024)
    pool = SandboxPool(BubblewrapProvider(config), 1)
    async with pool.leased(START) as sandbox:
        made = await shell(sandbox, "head -c 60000000 /dev/urandom > f; sha256sum f")
        snapshot = await sandbox.snapshot()
    async with pool.leased(replace(START, snapshot=snapshot)) as later:
        assert (await shell(later, "sha256sum f")).output == made.output


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
    monkeypatch.setattr(bubblewrap, "INSIDE", INSIDE.replace("MOST_FILES = 1 << 16", "MOST_FILES = 100"))
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
