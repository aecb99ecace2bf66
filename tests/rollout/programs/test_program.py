"""Programs: what they are given, what is kept of what they say, and that nothing of them stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.programs.program import Launch, Program, ProgramKilled
from tests.integration.loop import ROOT


def python(text: str) -> Launch:
    return Launch(("python", "-c", text))


async def ended(program: Program, **variables: str) -> str:
    """Run a program to its end, and return what it said."""
    try:
        await program.start(variables)
        await program.ended()
        return program.last_output()
    finally:
        folder = program.folder
        await program.close()
        assert not folder.exists()


async def test_python_is_that_of_the_worker() -> None:
    assert await ended(Program(python("import sys; print(sys.executable)"))) == sys.executable


async def test_a_program_finds_the_modules_that_its_worker_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("own", "'of the user'"), ("both", "'of the user'"), ("first/both", "'given'")):
        (tmp_path / "first").mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(f"TEXT = {text}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    launch = Launch(("python", "-c", "import both, own; print(own.TEXT, both.TEXT)"), str(tmp_path / "first"))
    assert await ended(Program(launch)) == "of the user given"


async def test_the_end_of_what_a_program_said_is_kept() -> None:
    program = Program(python("import sys; print('a' * 10**6, 'b' * 9); sys.exit(4)"))
    with pytest.raises(RuntimeError, match=r"python ended with status 4: a{200,290} b{9}$"):
        await ended(program)


async def test_a_program_that_a_signal_ended_is_told_from_one_that_failed() -> None:
    with pytest.raises(ProgramKilled, match="ended with status -11"):
        await ended(Program(python("import os; os.kill(os.getpid(), 11)")))


async def test_a_program_that_did_not_start_has_no_process() -> None:
    program = Program(python(""))
    with pytest.raises(RuntimeError, match="python has not been started"):
        program.kill()
    await program.close()
    await program.close()


@pytest.mark.parametrize(("standing", "place"), [(False, "env={}"), (True, "cwd='/'")])
def test_a_program_ends_when_its_worker_is_killed(tmp_path: Path, *, standing: bool, place: str) -> None:
    pipe, child_pipe = tmp_path / "pipe", tmp_path / "child"
    os.mkfifo(pipe)
    os.mkfifo(child_pipe)
    holds = "import os, time; os.open({!r}, os.O_WRONLY); time.sleep(10**6)"
    program = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    child = f"[sys.executable, '-c', {holds.format(str(child_pipe))!r}]"
    program += f"subprocess.Popen({child}, start_new_session=True, {place})\n"
    program += holds.format(str(pipe))
    worker = f"""
import asyncio
from rollout.programs.program import Launch, Program

async def work():
    program = Program(Launch(("python", "-c", {program!r})))
    await program.start({{}}, lines={standing})
    await program.ended()

asyncio.run(work())
"""
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    clear = "from rollout.programs.folder import clear_left_folders as clear; assert clear() == {}"
    with subprocess.Popen([sys.executable, "-c", worker], cwd=ROOT, env=variables) as process:
        with pipe.open("rb") as opened, child_pipe.open("rb") as child:  # once both have opened theirs
            subprocess.run([sys.executable, "-c", clear.format(0)], cwd=ROOT, env=variables, check=True)
            process.kill()
            assert opened.read() == b""
            process.wait()
            subprocess.run([sys.executable, "-c", clear.format(1)], cwd=ROOT, env=variables, check=True)
            assert child.read() == b""
    assert not list(tmp_path.glob("tether-program-*"))
