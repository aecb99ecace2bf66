"""Programs of another user than the worker's: they have its rights, and end with their episode."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.programs.owner import find_owner
from rollout.programs.program import Launch, Program

USER = "nobody"
SCRIPT = """
set -e
id -u > who
echo "$HOME" >> who
cat given >> who
! cat "$1" 2> /dev/null
! cat /proc/$PPID/environ 2> /dev/null
sleep 1000 > /dev/null 2>&1 &
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that every user can pass, unlike that of pytest."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize(("user", "why"), [("no-such-user", "no user"), ("root", "name another user")])
def test_a_user_that_protects_nothing_is_refused(user: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"setting environment.options.user: .*{why}"):
        find_owner(user)


async def test_a_program_has_the_rights_of_its_user_alone(temporary: Path) -> None:
    if os.getuid() != 0:
        with pytest.raises(SettingsError, match="only root may run programs as nobody"):
            find_owner(USER)
        return
    secret = temporary / "secret"
    secret.write_text("of the worker")
    secret.chmod(0o600)
    program = Program(Launch(("sh", "-c", SCRIPT, "sh", str(secret)), owner=find_owner(USER)))
    try:
        program.write("given", "task")
        await program.start({})
        await program.ended()
        entry = pwd.getpwnam(USER)
        assert program.read("who", 1000) == f"{entry.pw_uid}\n{entry.pw_dir}\ntask".encode()
        assert program.read("missing", 1000) is None
        with pytest.raises(ValueError, match="more than 3 bytes"):
            program.read("who", 3)
        (program.folder / "link").symlink_to(secret)
        with pytest.raises(OSError, match="symbolic links"):
            program.read("link", 1000)
        assert len(processes_in(program.folder)) == 1
    finally:
        await program.close()
    assert processes_in(program.folder) == []
    assert not program.folder.exists()


def processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(str(folder)):
                found.append(entry.name)
        except OSError:
            continue
    return found
