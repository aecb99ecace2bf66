"""Tests that every sandbox must pass; a module provides the fixture `provider` and subclasses
`SandboxContract`.

`provider` is of `CONFIG`. No test waits for a time: what shall be ended runs forever.
"""

import asyncio
import contextlib
import secrets

import pytest

from rollout.config import SandboxConfig
from rollout.sandboxes.base import (
    Executed,
    Provider,
    Sandbox,
    SandboxCommand,
    SandboxDied,
    SandboxFull,
    Start,
)
from rollout.sandboxes.pool import SandboxPool
from rollout.tools.command_output import shell_command

CONFIG = SandboxConfig(memory_mb=256, disk_mb=8, processes=24, cpu_s=20)
START = Start(lease_s=300)
OUTPUT = 1 << 14

HOSTILE = {
    "fork bomb": ":(){ :|:& };:",
    "renewed bomb": "while true; do (setsid sh -c 'sleep 1000' &) ; done",
    "kills": "kill -9 $PPID; kill -9 -1",
    "memory": "x=a; while true; do x=$x$x; done",
    "disk": "head -c 100000000 /dev/zero > big; rm -f big",
    "directories": "for i in 1 2 3 4 5 6 7 8 9; do mkdir d$i; done; mkdir d1/d; rm -rf d*",
    "daemons": "setsid sleep 10000 & setsid sleep 10000 &",
    "closed output": "exec 1<&-; exec 2<&-; sleep 10000",
    "output": "yes",
}


async def shell(sandbox: Sandbox, text: str, wall_s: float = 60.0) -> Executed:
    return await sandbox.exec(shell_command(text, wall_s, OUTPUT))


class SandboxContract:
    """Promises of the interface `Sandbox`, a test each."""

    reaches_network = False
    """Whether a sandbox reaches other hosts."""

    async def test_a_command_says_its_output_and_status(self, provider: Provider) -> None:
        async with SandboxPool(provider, 2).leased(START) as sandbox:
            found = await sandbox.exec(
                SandboxCommand(("sh", "-c", "echo $A; echo no >&2; exit 3"), 60, OUTPUT, {"A": "x y"})
            )
            assert (sorted(found.output.split(b"\n")), found.ended, found.status) == (
                [b"", b"no", b"x y"], "", 3,
            )  # fmt: skip
            assert (await shell(sandbox, "pwd > p; cat < p")).output.startswith(b"/")

    async def test_a_missing_program_is_a_status(self, provider: Provider) -> None:
        async with SandboxPool(provider, 2).leased(START) as sandbox:
            assert (await sandbox.exec(SandboxCommand(("no-such-program",), 60, OUTPUT))).status in (126, 127)

    async def test_files_last_over_calls_and_belong_to_one_sandbox(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 2)
        async with pool.leased(START) as first, pool.leased(START) as second:
            await shell(first, "mkdir -p a/b && echo hi > a/b/f && ln -s b/f a/l")
            assert (await shell(first, "cat a/l")).output == b"hi\n"
            assert await first.read("a/b/f", 100) == b"hi\n"
            assert (await shell(second, "ls -A")).output == b""
            assert await second.read("a/b/f", 100) is None

    async def test_files_are_written_and_read_as_they_are(self, provider: Provider) -> None:
        data = secrets.token_bytes(70_000) + b"\n\0"
        async with SandboxPool(provider, 2).leased(START) as sandbox:
            await sandbox.write("new/dir/file", data)
            await sandbox.write("new/dir/other", b"")
            assert (
                await shell(sandbox, "wc -c < new/dir/file; echo more >> new/dir/other")
            ).output.strip() == b"70002"
            assert await sandbox.read("new/dir/file", len(data)) == data
            assert await sandbox.read("new/dir/other", 100) == b"more\n"
            with pytest.raises(SandboxFull):
                await sandbox.read("new/dir/file", len(data) - 1)
            with pytest.raises(SandboxFull):
                await sandbox.read("new/dir", 100)

    async def test_a_snapshot_has_the_files_of_its_moment(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 2)
        async with pool.leased(START) as sandbox:
            await shell(sandbox, "mkdir d; echo 1 > d/f; chmod 755 d/f; ln -s f d/l; ln d/f d/h")
            snapshot = await sandbox.snapshot()
            await shell(sandbox, "echo 2 > d/f; rm d/l")
        try:
            for _ in range(2):
                async with pool.leased(Start(300, snapshot=snapshot)) as later:
                    assert (
                        await shell(later, "cat d/l d/h; test -x d/f && echo x; echo 3 > d/f")
                    ).output == b"1\n1\nx\n"
        finally:
            await pool.forget(snapshot)

    async def test_a_command_is_ended_after_its_time_and_output(self, provider: Provider) -> None:
        async with SandboxPool(provider, 2).leased(START) as sandbox:
            found = await shell(sandbox, "echo 1 > f; echo began; sleep 10000", 2.0)
            assert (found.output, found.ended) == (b"began\n", "time")
            found = await sandbox.exec(SandboxCommand(("sh", "-c", "cat f; yes"), 60, 1000))
            assert (found.output[:4], len(found.output), found.ended) == (b"1\ny\n", 1000, "output")
            assert (await shell(sandbox, "cat f")).output == b"1\n"

    @pytest.mark.parametrize("command", HOSTILE.values(), ids=HOSTILE.keys())
    async def test_a_hostile_command_harms_its_own_sandbox_alone(
        self, provider: Provider, command: str
    ) -> None:
        """It may be ended, or its sandbox die; the next sandbox works, and so does another one."""
        pool = SandboxPool(provider, 2)
        async with pool.leased(START) as other:
            async with pool.leased(START) as sandbox:
                try:
                    await shell(sandbox, command, 2.0)
                    await shell(sandbox, "echo 1 > f; cat f", 20.0)
                except SandboxDied:
                    pass
            assert (await shell(other, "echo 1 > f; cat f")).output == b"1\n"
        async with pool.leased(START) as later:
            assert (await shell(later, "ls -A; echo 2")).output == b"2\n"

    async def test_links_lead_nowhere_outside(
        self, provider: Provider, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        secret = tmp_path_factory.mktemp("outside") / "secret"
        secret.write_text("credentials")
        async with SandboxPool(provider, 2).leased(START) as sandbox:
            found = await shell(sandbox, f"ln -s {secret} l; ln -s {secret.parent} d; cat l d/secret")
            assert b"credentials" not in found.output
            for path in ("l", "d/secret", "../../../../../.." + str(secret), str(secret)):
                with contextlib.suppress(SandboxFull):
                    assert await sandbox.read(path, 100) in (None, b"changed")  # of a /tmp of its own
                with contextlib.suppress(SandboxFull):
                    await sandbox.write(path, b"changed")
        assert secret.read_text() == "credentials"
        assert [path.name for path in secret.parent.iterdir()] == ["secret"]

    async def test_no_other_host_is_reached(self, provider: Provider) -> None:
        if self.reaches_network:
            return
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with SandboxPool(provider, 2).leased(START) as sandbox:
                connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
                for host, to in (("127.0.0.1", port), ("1.1.1.1", 80)):
                    order = SandboxCommand(("python3", "-c", connect, host, str(to)), 60, OUTPUT)
                    assert (await sandbox.exec(order)).status not in (0, 127)

    async def test_a_storm_of_starts_is_a_queue(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 4)

        async def once(number: int) -> bytes:
            async with pool.leased(START) as sandbox:
                return (await shell(sandbox, f"echo {number}", 300.0)).output

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(once(number)) for number in range(self.storm)]
        assert [task.result() for task in running] == [f"{number}\n".encode() for number in range(self.storm)]
        assert pool.running == 0

    storm = 16
    """Sandboxes of the test of a storm."""

    async def test_a_cancelled_command_ends_and_the_sandbox_stops(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 2)
        async with pool.leased(START) as sandbox:
            await shell(sandbox, "true")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await shell(sandbox, "sleep 10000", 10_000.0)
        assert pool.running == 0

    async def test_a_stopped_sandbox_stops_again(self, provider: Provider) -> None:
        pool = SandboxPool(provider, 2)
        async with pool.leased(START) as sandbox:  # which stops it, too
            await sandbox.stop()
            with pytest.raises(SandboxDied):
                await shell(sandbox, "true")
        assert pool.running == 0
