"""What a program started ends with it, although it left the program's group and directory."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.programs.left_processes import MARK, Sweeper, kill_left_processes
from rollout.programs.program import Launch, Program

HOLDS = "import os, time; os.open({!r}, os.O_WRONLY); print(end='', flush=True); time.sleep(10**6)"
LEAVES = """
import os, subprocess, sys, time
child = {child!r}
left = subprocess.Popen([sys.executable, "-c", child], cwd="/", start_new_session=True)
"""


@pytest.mark.parametrize("ends", [True, False])
async def test_process_that_left_the_group_and_the_directory_ends_with_the_program(
    tmp_path: Path, *, ends: bool
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = LEAVES.format(child=HOLDS.format(str(pipe))) + ("" if ends else "time.sleep(10**6)")
    program = Program(Launch((sys.executable, "-c", text)))
    await program.start({})
    with await asyncio.to_thread(pipe.open, "rb") as held:  # once the child has opened it
        if ends:
            await program.ended()
        await program.close()
        assert await asyncio.to_thread(held.read) == b""
    assert not program.folder.exists()


async def test_one_search_kills_what_several_programs_left_and_nothing_else(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    command = [sys.executable, "-c", "input()"]

    def started(mark: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, MARK: mark}
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, start_new_session=True)

    with started("one") as one, started("two") as two, started("three") as three, started("on") as other:
        assert kill_left_processes([]) == 0
        assert kill_left_processes(folders[:1]) == 1
        assert one.wait() == -9
        sweeper = Sweeper()
        async with asyncio.TaskGroup() as tasks:
            for folder in folders[1:]:
                tasks.create_task(sweeper.sweep(folder))
        assert (two.wait(), three.wait()) == (-9, -9)
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0


def test_a_process_is_found_by_the_directory_it_works_in_and_not_by_a_name(tmp_path: Path) -> None:
    home, folder, moved, link = (tmp_path / name for name in ("home", "folder", "moved", "link"))
    home.mkdir()
    (folder / "deep").mkdir(parents=True)
    link.symlink_to(home)

    def started(directory: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=directory)

    with started(home) as other, started(folder / "deep") as left:
        assert kill_left_processes([link]) == 0
        folder.rename(moved)
        folder.mkdir()
        assert kill_left_processes([folder]) == 0
        assert kill_left_processes([moved]) == 1
        assert left.wait() == -9
        other.communicate(b"\n")
    assert other.returncode == 0
