"""The tool `shell`: what it answers, what it keeps, and what hostile commands cannot do."""

import os
from contextlib import AsyncExitStack

import pytest

from reward.sandbox.runner import Limits
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.shell import ENDED, ShellTool
from tests.reward.sandbox.test_runner import leftovers

pytestmark = pytest.mark.xdist_group("sandbox")

RUNS = SandboxRuns(2)
LIMITS = Limits(wall_s=60, cpu_s=5, memory_mb=256, file_mb=8, output_kb=64)


def shell(**limits: float) -> ShellTool:
    return ShellTool(Limits(**{"wall_s": 60.0, "file_mb": 8, "output_kb": 64, **limits}), RUNS).opened(
        AsyncExitStack()
    )  # type: ignore[arg-type]


async def test_files_are_kept_over_the_calls_of_an_episode_and_shared_with_no_other() -> None:
    tool = ShellTool(LIMITS, RUNS)
    first, second = tool.opened(AsyncExitStack()), tool.opened(AsyncExitStack())
    made = (
        "mkdir -p a/b && echo hi > a/b/f && chmod 700 a/b/f && ln -s b/f a/l && ln a/b/f a/b/h && cd a && ls"
    )
    assert await first.run(made) == "b\nl"
    assert (
        await first.run("cat a/l a/b/h; pwd | sed 's,.*/,,'; ls -l a/b/f | cut -c1-10")
        == "hi\nhi\nwork\n-rwx------"
    )
    assert await second.run("ls -A") == "(no output)"
    assert await first.run("rm -r a; ls nothing") == (
        "ls: cannot access 'nothing': No such file or directory\n[exit status 2]"
    )
    assert await first.run("ls -A") == "(no output)"


async def test_a_command_that_takes_too_long_or_says_too_much_is_ended_and_its_files_are_kept() -> None:
    tool = shell(wall_s=1.0, output_kb=1, cpu_s=30)
    assert await tool.run("echo 1 > f; echo began; sleep 10000") == "began\n[ended after 1 s]"
    said = await tool.run("cat f; yes")
    assert said.startswith("1\ny\n")
    assert said.endswith("[ended after 1024 bytes of output]")
    assert len(said) < 1100
    assert await tool.run("cat f") == "1"


async def test_a_directory_that_grows_too_large_is_as_before() -> None:
    tool = shell()
    await tool.run("echo 1 > f")
    said = await tool.run("head -c 3000000 /dev/zero > g")
    assert said == "[the directory has more than 2097152 bytes; it is as before the command]"
    assert await tool.run("head -c 100000000 /dev/zero > g; ls") != ""
    assert await tool.run("ls") == "f"


@pytest.mark.parametrize(
    "command",
    [
        ":(){ :|:& };:",
        "kill -9 $PPID; kill -9 -1",
        "x=a; while true; do x=$x$x; done",
        "while true; do mkdir d; cd d; done",
        "setsid sleep 10000 & setsid sleep 10000 &",
        "exec 1<&-; exec 2<&-; sleep 10000",
        "printf '{\"said\": 3}' > /proc/$PPID/fd/1",
        "mkfifo p; cat p",
    ],
)
async def test_a_hostile_command_is_answered_and_leaves_nothing(command: str) -> None:
    before = leftovers()
    tool = shell(wall_s=2.0, cpu_s=1, processes=6, memory_mb=256)
    await tool.run("echo 1 > f")
    await tool.run(command)
    assert (await tool.run("cat f")).startswith("1")
    assert leftovers() <= before


async def test_files_outside_of_the_directory_cannot_be_read_or_changed() -> None:
    tool = shell()
    attempts = [
        f"cat /proc/{os.getpid()}/environ",
        "cat /etc/passwd",
        "echo x > /tmp/tether-escape",
        "echo x > /dev/shm/tether-escape",
        "bash -c 'exec 3<>/dev/tcp/127.0.0.1/22'",
        f"kill -9 {os.getpid()}",
        "mount -t tmpfs none .",
        "ln -s /etc l; cat l/passwd",
    ]
    kinds = (await RUNS.run("print(1)", "", LIMITS)).isolation
    if not {"landlock", "net", "pid", "seccomp"} <= kinds:
        pytest.skip("this kernel offers less isolation")
    for attempt in attempts:
        said = await tool.run(f"({attempt}) 2>/dev/null && echo escaped")
        assert "escaped" not in said, attempt


async def test_a_command_that_ends_the_sandbox_is_an_error() -> None:
    assert await shell(memory_mb=256).run("kill -9 $PPID; sleep 100") in (ENDED, "(no output)")
