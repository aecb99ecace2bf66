"""A private process is closed to processes of its own user, and its files to other users; real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.loop import ROOT

PROGRAM = """
import os, sys
from protocol.host import prctl

def be_a_common_user():
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
    prctl.open_to_own_user()  # as it is after an exec

be_a_common_user()
ready, done = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    if sys.argv[1] != "open":
        prctl.keep_private()
    if sys.argv[1] == "opened":
        prctl.open_to_own_user()
    os.close(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o666))
    os.write(ready[1], b"x")
    os.read(done[0], 1)
    os._exit(0)
os.close(ready[1])
assert os.read(ready[0], 1), "the child has failed"
for name in ("environ", "mem", f"fd/{ready[0]}"):
    try:
        os.close(os.open(f"/proc/{child}/{name}", os.O_RDONLY))
        print(name.split("/")[0])
    except PermissionError:
        pass
os.write(done[1], b"x")
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("kind", "readable", "mode"),
    [
        ("open", ["environ", "mem", "fd"], 0o644),
        ("private", [], 0o600),
        ("opened", ["environ", "mem", "fd"], 0o600),
    ],
)
def test_a_private_process_is_closed_to_its_own_user(
    tmp_path: Path, kind: str, readable: list[str], mode: int
) -> None:
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False, umask=0o022,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (readable, "")
    assert (tmp_path / kind).stat().st_mode & 0o777 == mode
