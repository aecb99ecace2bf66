"""A user whose code runs in the sandbox; as root the tests try a second user, who is not root.

Code of root runs as `nobody`, so the home is owned by `nobody` then. The interpreter is a virtual environment
in the home, as a user's often is: the code can read files there that its user owns.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from reward.sandbox import runner
from reward.sandbox.child import NOBODY, libc, seccomp
from reward.sandbox.runner import Limits, Verdict, run_tests

ROOT = Path(__file__).parents[2]
OTHER = 12345
UIDS = [0, OTHER] if os.getuid() == 0 else [os.getuid()]
PYTHONS = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
NO_UNSHARE = struct.pack(
    "=HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 272, 6, 0, 0, 0x50001, 6, 0, 0, 0x7FFF0000
)
"""A seccomp filter (x86-64): unshare fails with EPERM."""


@dataclass(frozen=True)
class SandboxUser:
    """A user with a home, which holds `secret` (mode 600), `folder` (mode 700) and the environment `venv`."""

    uid: int
    home: Path
    temporary: Path
    """Where sandboxes of this user have their working directories."""
    namespaces: bool = True
    """False as in a container that allows none."""

    def run(self, code: str, *tests: str, limits: Limits) -> Verdict:
        """Run code and its tests in the sandbox, as this user."""
        given = {"code": code, "tests": tests, "limits": asdict(limits)}
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, str(self.uid), str(self.home), str(int(self.namespaces))],
            input=json.dumps(given), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )  # fmt: skip
        passed, timed_out, isolation = json.loads(done.stdout)
        return Verdict(frozenset(passed), {}, timed_out, frozenset(isolation))

    def state(self) -> dict[str, object]:
        """Return all that can be changed of the files in the home. A change of any kind changes the ctime."""
        found: dict[str, object] = {}
        for path in (self.home, *self.home.rglob("*")):
            status = path.lstat()
            found[str(path)] = (
                status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_ctime_ns,
                os.listxattr(path, follow_symlinks=False),
                path.read_bytes() if path.is_file() and path.stat().st_size < 1000 else None,
            )  # fmt: skip
        return found


@contextmanager
def sandbox_user(uid: int) -> Iterator[SandboxUser]:
    """Make the home of a user, and remove it."""
    owner = uid or NOBODY
    with tempfile.TemporaryDirectory(prefix="tether-user-") as folder:
        home, temporary = Path(folder, "home"), Path(folder, "tmp")
        for made in (home, home / "folder", temporary):
            made.mkdir()
        (home / "secret").write_text("secret")
        (home / "folder" / "file").write_text("old")
        shutil.copytree(runner.CHILD.parent, home / "sandbox")  # the checkout may be closed to other users
        _make_environment(home / "venv", _python(uid))
        (home / "venv" / "owned").write_text("old")
        for path in (home, home / "secret", home / "folder", home / "venv" / "owned"):
            os.setxattr(path, "user.kept", b"kept")
        if os.getuid() == 0:
            for path in (home, *home.rglob("*"), temporary):
                os.chown(path, owner, owner, follow_symlinks=False)
        (home / "secret").chmod(0o600)
        (home / "folder").chmod(0o700)
        Path(folder).chmod(0o755)
        yield SandboxUser(uid, home, temporary)


def _python(uid: int) -> str:
    """Return an interpreter that the user may read."""
    for python in PYTHONS:
        try:
            subprocess.run([python, "-I", "-c", ""], user=uid, check=True)
        except OSError:
            continue
        return os.path.realpath(python)
    pytest.skip("there is no Python that another user than root may read")


def _make_environment(folder: Path, python: str) -> None:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\n")


def become(uid: int) -> None:
    """Drop the rights of root, unless this process has that user already."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self stays root's


def main() -> None:
    """Become the user, run what standard input holds, and print the verdict."""
    uid, home = int(sys.argv[1]), Path(sys.argv[2])
    become(uid)
    if sys.argv[3] == "0":
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        assert seccomp(NO_UNSHARE)
    sys.executable = str(home / "venv" / "bin" / "python")
    runner.CHILD = home / "sandbox" / "child.py"
    given = json.load(sys.stdin)
    verdict = run_tests(given["code"], given["tests"], Limits(**given["limits"]))
    json.dump([sorted(verdict.passed), verdict.timed_out, sorted(verdict.isolation)], sys.stdout)


if __name__ == "__main__":
    main()
