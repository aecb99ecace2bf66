"""Tests that every sandbox on the worker's own host must pass, also when that worker is killed.

A module provides `made(config)`, the fixture `provider`, whose folders are in the test's `tmp_path`, and a
subclass of `HostSandboxContract`. Workers that are killed are processes of their own, which run `play`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.choices import load
from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import programs_directory
from rollout.sandboxes.base import Provider, SandboxCommand, SandboxDied, Start
from rollout.sandboxes.episode_sandbox import EpisodeSandbox
from rollout.sandboxes.pool import SandboxPool
from rollout.tools.sandbox_tool import make_sandbox_tool
from tests.contracts.sandbox_suite import CONFIG, OUTPUT, START, SandboxContract, shell

ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
WORKER = """
import asyncio, sys, tempfile
tempfile.tempdir = sys.argv[1]
from tests.contracts.host_sandbox_suite import play
asyncio.run(play(sys.argv[2], sys.argv[3], sys.argv[5:], int(sys.argv[4]), is_killed=True))
"""
BEGUN = ("echo 1 > f", "cat f", "head -c 8 /dev/urandom | od -An -tx1 | tee g")
"""Commands of an episode; nobody can repeat the output of the last one."""


class Record:
    """Results of an episode by name, as JSON in a file, over several workers."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.results: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if name not in self.results:
            self.results[name] = await work()
            self._path.write_text(json.dumps(self.results))
        return json.loads(json.dumps(self.results[name]))


async def play(
    factory: str, record_file: str, lines: Sequence[str], every: int, *, is_killed: bool = False
) -> list[str]:
    """Play an episode of command lines in a new sandbox, and return the answers.

    Args:
        factory: `MODULE:FUNCTION` that makes the provider.
        record_file: what earlier workers have recorded.
        lines: the commands.
        every: `snapshot_calls`.
        is_killed: the process is killed when the last command has run and is not recorded yet.
    """
    record, answers = Record(record_file), []
    pool = SandboxPool(load(factory)(CONFIG), 1)
    async with EpisodeSandbox(pool, replace(CONFIG, snapshot_calls=every), 300, record.once) as sandbox:
        tool = make_sandbox_tool("shell", sandbox, 60, OUTPUT)
        for number, line in enumerate(lines):

            async def run(number: int = number, line: str = line) -> tuple[str, str]:
                answer = await tool.run(line)
                if is_killed and number == len(lines) - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return answer, tool.kept

            answer, kept = await record.once(f"call {number}", run)
            tool.restore(line, kept)
            answers.append(answer)
    await pool.close()
    return answers


class HostSandboxContract(SandboxContract):
    """Promises of a sandbox on the worker's own host, a test each."""

    made: str
    """`MODULE:FUNCTION` that makes a provider."""

    @abstractmethod
    def running(self, folder: str) -> list[Any]:
        """Return what runs of the sandbox that has a folder of this name; each has the method `kill`."""

    def provider_of(self, config: SandboxConfig) -> Provider:
        provider: Provider = load(self.made)(config)
        return provider

    def kill_a_worker(self, folder: Path, record: Path, every: int, *lines: str) -> str:
        """Play an episode in a worker that is killed behind the last command; return what it leaves."""
        words = [sys.executable, "-c", WORKER, str(folder), self.made, str(record), str(every), *lines]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
        (left,) = programs_directory().iterdir()
        return left.name

    async def test_it_reaches_its_endpoint_under_the_same_url_and_nothing_else(
        self, provider: Provider
    ) -> None:
        app = web.Application()

        async def said(request: web.Request) -> web.Response:
            return web.Response(text="s" * 200_000)

        app.router.add_get("/s/key/v1", said)
        runner = web.AppRunner(app)
        await runner.setup()
        for _ in range(2):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        url, other = (f"http://127.0.0.1:{port}" for _, port in runner.addresses)
        try:
            async with SandboxPool(provider, 1).leased(Start(300, endpoint=url)) as sandbox:
                for _ in range(2):
                    order = SandboxCommand(("python3", "-c", ASK, f"{url}/s/key/v1"), 60, 1 << 20)
                    found = await sandbox.exec(order)
                    assert (found.output, found.status) == (b"s" * 200_000 + b"\n", 0)
                order = SandboxCommand(("python3", "-c", ASK, f"{other}/s/key/v1"), 60, OUTPUT)
                assert (await sandbox.exec(order)).status == 1
        finally:
            await runner.cleanup()

    async def test_an_endpoint_on_another_host_is_refused(self, provider: Provider) -> None:
        with pytest.raises(SettingsError, match=r"on loopback, not rollout\.example"):
            await provider.start(Start(10, endpoint="https://rollout.example:8000"))

    async def test_a_sandbox_that_was_killed_says_so_and_another_one_starts(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 1)
        async with pool.leased(START) as sandbox:
            (folder,) = programs_directory().iterdir()
            running = self.running(folder.name)
            assert running
            await asyncio.to_thread(running[0].kill)
            with pytest.raises(SandboxDied, match="the sandbox has ended"):
                await shell(sandbox, "echo 1")
        async with pool.leased(START) as later:
            assert (await shell(later, "echo 1")).output == b"1\n"

    async def test_it_ends_with_its_lease(self, provider: Provider) -> None:
        async with SandboxPool(provider, 1).leased(Start(lease_s=1)) as sandbox:
            with pytest.raises(SandboxDied):
                await shell(sandbox, "sleep 10000", 10_000.0)

    async def test_the_next_worker_removes_what_a_killed_one_leaves(
        self, provider: Provider, tmp_path: Path
    ) -> None:
        left = await asyncio.to_thread(self.kill_a_worker, tmp_path, tmp_path / "record", 0, "sleep 1000 &")
        async with SandboxPool(provider, 1).leased(START) as sandbox:
            assert left not in [path.name for path in programs_directory().iterdir()]
            assert self.running(left) == []
            await shell(sandbox, "true")
        assert list(programs_directory().iterdir()) == []

    async def test_the_worker_s_environment_is_not_in_it(
        self, provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TETHER_SECRET_TEST", "credentials")
        async with SandboxPool(provider, 1).leased(START) as sandbox:
            assert b"credentials" not in (await shell(sandbox, "env; cat /proc/*/environ")).output

    async def test_a_large_snapshot_has_the_processor_time_it_needs(self, provider: Provider) -> None:
        limits = replace(CONFIG, cpu_s=1, disk_mb=64, memory_mb=1024)
        pool = SandboxPool(self.provider_of(limits), 1)
        async with pool.leased(START) as sandbox:
            made = await shell(sandbox, "head -c 60000000 /dev/urandom > f; sha256sum f")
            snapshot = await sandbox.snapshot()
        async with pool.leased(replace(START, snapshot=snapshot)) as later:
            assert (await shell(later, "sha256sum f")).output == made.output
        await pool.close()

    @pytest.mark.parametrize(("every", "again"), [(0, 3), (1, 0), (2, 1), (3, 0)])
    async def test_an_episode_continues_in_its_files_when_its_worker_was_killed(
        self, provider: Provider, tmp_path: Path, every: int, again: int
    ) -> None:
        """With a snapshot after the command whose output nobody can repeat, its files are the same bytes."""
        path = tmp_path / "record"
        lost = "echo lost > f"
        left = await asyncio.to_thread(self.kill_a_worker, tmp_path, path, every, *BEGUN, lost)
        first = [answer for answer, _ in (Record(str(path)).results[f"call {i}"] for i in range(len(BEGUN)))]
        later = await play(self.made, str(path), [*BEGUN, "cat f g; echo 2 > f", "cat f"], every)
        assert later[:3] == first
        assert later[3].startswith("1\n")
        assert (later[3] == f"1\n{first[2]}") == (again == 0)
        assert later[4] == "2"
        starts = {
            name: said for name, said in Record(str(path)).results.items() if name.startswith("sandbox")
        }
        assert [said["commands_again"] for said in starts.values()] == [0, again]
        assert self.running(left) == []
