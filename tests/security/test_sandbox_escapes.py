"""Code that tries to escape from the sandbox, as root and as another user.

What needs the kernel's help is skipped without it.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from reward.sandbox.child import fork, wait_for
from reward.sandbox.runner import NEEDED, Limits, Verdict, _remove
from reward.verifiers import python_tests
from tests.changes import slow_unless_changed
from tests.security.sandbox_user import ROOT, UIDS, SandboxUser, become, sandbox_user

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed("reward/sandbox/", "protocol/host/", "tests/security/"),
]

LIMITS = Limits(wall_s=20.0, cpu_s=2, memory_mb=256, file_mb=1, processes=6)
HEAD = "import ctypes, fcntl, mmap, os, signal, socket, struct, subprocess, sys\n"
HEAD += "libc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True)
class Attacker:
    """A user in whose name hostile code runs, and what isolates it."""

    user: SandboxUser
    isolation: frozenset[str]

    def run(self, code: str, *tests: str, limits: Limits = LIMITS) -> Verdict:
        return self.user.run(HEAD + code, *tests, limits=limits)

    def need(self, *kinds: str) -> None:
        if missing := {*kinds} - self.isolation:
            pytest.skip(f"this kernel offers no {', '.join(sorted(missing))}")

    def all_fail(self, attempts: list[str], code: str = "", limits: Limits = LIMITS) -> None:
        """Run each attempt, and then code that works: the attempt must fail, not the sandbox.

        No file of the user may change, whatever the attempt says of itself.
        """
        before = self.user.state()
        verdict = self.run(code, *attempts, "assert 1 + 1 == 2", limits=limits)
        assert self.user.state() == before
        escaped = [attempts[i] for i in verdict.passed if i < len(attempts)]
        assert escaped == []
        assert verdict.passed == {len(attempts)}


@pytest.fixture(autouse=True)
def nothing_is_left(attacker: Attacker) -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert os.listdir(attacker.user.temporary) == []


@pytest.fixture(scope="module", params=UIDS, ids=lambda uid: "user" if uid else "root")
def attacker(request: pytest.FixtureRequest) -> Iterator[Attacker]:
    with sandbox_user(request.param) as user:
        yield Attacker(user, user.run("", "pass", limits=LIMITS).isolation)


def test_an_endless_fork_bomb_ends(attacker: Attacker) -> None:
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    limits = Limits(wall_s=3.0, cpu_s=1, processes=6)
    assert attacker.run(bomb, "pass", limits=limits).passed == frozenset()


def test_a_bomb_that_renews_itself_ends(attacker: Attacker) -> None:
    bomb = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    try:\n"
    bomb += "        if os.fork():\n            os.setsid()\n"
    bomb += "            os._exit(0)\n    except OSError:\n        pass\n"
    limits = Limits(wall_s=3.0, cpu_s=1, processes=6)
    assert attacker.run(bomb, "pass", limits=limits).passed == frozenset()


def test_memory_is_limited_in_every_process(attacker: Attacker) -> None:
    bomb = "def bomb():\n    if os.fork() == 0:\n        try:\n            x = bytearray(512 << 20)\n"
    bomb += "            os._exit(0)\n        except MemoryError:\n            os._exit(7)\n"
    bomb += "    return os.waitstatus_to_exitcode(os.wait()[1])\n"
    assert attacker.run(bomb, "assert bomb() == 7", "assert bomb() == 7").passed == {0, 1}


def test_there_is_no_memory_that_is_not_counted(attacker: Attacker) -> None:
    attacker.need("seccomp")
    fill = "def fill(make):\n    held = 0\n    for _ in range(24):\n        made = make()\n"
    fill += "        if made < 0:\n            break\n        os.ftruncate(made, 16 << 20)\n"
    fill += "        for offset in range(0, 16 << 20, 4 << 20):\n"
    fill += "            with mmap.mmap(made, 4 << 20, offset=offset) as memory:\n"
    fill += "                memory[:] = bytes(4 << 20)\n"
    fill += "        held += 16\n    return held\n"
    attacker.all_fail(
        [
            "assert fill(lambda: libc.syscall(447, 0)) > 256",  # memfd_secret
            "assert fill(lambda: os.memfd_create('x')) > 256",
            "assert libc.syscall(447, 0) >= 0",
            "os.memfd_create('x')",
            "assert libc.shmget(0, 1 << 20, 0o1600) >= 0",
            "assert libc.msgget(0, 0o1600) >= 0",
            "assert libc.semget(0, 1, 0o1600) >= 0",
            "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",  # F_SETPIPE_SZ
        ],
        fill,
        Limits(wall_s=20.0, cpu_s=2, memory_mb=256, file_mb=16, processes=6),
    )


def test_there_is_no_socket(attacker: Attacker) -> None:
    attacker.need("net", "seccomp")
    stream, datagrams = str(attacker.user.home / "stream"), str(attacker.user.home / "datagrams")
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = opened.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(stream)
        local.listen()
        receiver = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        receiver.bind(datagrams)
        for path in (stream, datagrams):
            os.chmod(path, 0o777)
            opened.callback(os.unlink, path)
        attacker.all_fail([
            f"socket.create_connection({server.getsockname()!r}, 5)",
            "socket.create_server(('0.0.0.0', 0))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
            f"socket.socket(socket.AF_UNIX).connect({stream!r})",
            f"socket.socketpair()[0].connect({stream!r})",
            f"socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', {datagrams!r})",
            f"socket.socketpair()[0].sendto(b'x', {datagrams!r})",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        ])  # fmt: skip
        with pytest.raises(BlockingIOError):
            receiver.recv(1, socket.MSG_DONTWAIT)


def test_links_lead_nowhere(attacker: Attacker) -> None:
    attacker.need("landlock", "tmpfs")
    home = attacker.user.home
    target = str(home / "open")
    with open(target, "w") as file:
        file.write("old")
    os.chmod(target, 0o666)
    home.chmod(0o777)
    attacker.all_fail([
        f"os.symlink({target!r}, 'to'); open('to').read()",
        f"os.symlink({target!r}, 'also'); open('also', 'a').write('x')",
        f"os.symlink({str(home)!r}, 'dir'); os.mkdir('dir/new')",
        f"os.symlink({target!r}, 'mode'); os.chmod('mode', 0)",
        f"os.link({target!r}, 'hard')",
        f"open('mine', 'w').close(); os.rename('mine', {str(home / 'mine')!r})",
        f"os.unlink({target!r})",
        f"os.truncate({target!r}, 0)",
        f"os.symlink('/proc/self/root{target}', 'proc'); open('proc').read()",
        f"os.chmod('/proc/1/root{target}', 0)",
        f"os.chmod('/proc/{os.getpid()}/root{target}', 0)",
        "os.chdir('..'); open('here', 'w')",
        "open('/dev/shm/tether-escape', 'w')",
        f"open({str(ROOT / 'README.md')!r})",
    ])  # fmt: skip
    os.unlink(target)
    home.chmod(0o755)


def test_files_outside_keep_mode_owner_times_and_attributes(attacker: Attacker) -> None:
    attacker.need("readonly", "landlock", "seccomp")
    attacker.all_fail(changes_by_path(attacker.user.home))


def test_files_that_are_read_are_not_changed(attacker: Attacker) -> None:
    """Code may open files of its interpreter's environment, and get a descriptor of them."""
    attacker.need("readonly", "landlock", "seccomp")
    code = opening(attacker.user.home)
    attacker.all_fail(CHANGES_BY_DESCRIPTOR, code)
    assert attacker.run(code, "assert os.read(fd, 9) == b'old'").passed == {0}


def test_files_outside_are_kept_without_namespaces(attacker: Attacker) -> None:
    attacker.need("landlock", "seccomp")
    contained = replace(attacker, user=replace(attacker.user, namespaces=False))
    assert not contained.run("", "pass").isolation & {"pid", "net", "tmpfs", "readonly"}
    home = attacker.user.home
    contained.all_fail(changes_by_path(home) + CHANGES_BY_DESCRIPTOR, opening(home))


def changes_by_path(home: Path) -> list[str]:
    """Return attempts to change files by their path."""
    attempts = []
    for path in map(repr, map(str, (home / "secret", home / "folder", home / "venv" / "owned", home))):
        attempts += [
            f"os.chmod({path}, 0o777)",
            f"os.chmod({path}, 0)",
            f"assert libc.syscall(268, -100, {path}.encode(), 0o777, 0) == 0",  # fchmodat
            f"assert libc.syscall(452, -100, {path}.encode(), 0o777, 0) == 0",  # fchmodat2
            f"os.chmod(f'/proc/self/fd/{{os.open({path}, os.O_PATH)}}', 0o777)",
            f"os.chown({path}, os.getuid(), os.getgid())",
            f"os.lchown({path}, os.getuid(), os.getgid())",
            f"assert libc.syscall(260, -100, {path}.encode(), os.getuid(), os.getgid(), 0) == 0",  # fchownat
            f"assert libc.utime({path}.encode(), None) == 0",
            f"os.utime({path}, (1, 1))",
            f"os.utime({path}, (1, 1), follow_symlinks=False)",
            f"assert libc.syscall(235, {path}.encode(), None) == 0",  # utimes
            f"assert libc.syscall(261, -100, {path}.encode(), None) == 0",  # futimesat
            f"os.setxattr({path}, 'user.x', b'x')",
            f"os.setxattr({path}, 'user.x', b'x', follow_symlinks=False)",
            f"os.removexattr({path}, 'user.kept')",
            f"os.truncate({path}, 0)",
        ]
    return attempts


def opening(home: Path) -> str:
    """Return code that opens a file of the user."""
    return f"owned = {str(home / 'venv' / 'owned')!r}\nfd = os.open(owned, os.O_RDONLY)\n"


CHANGES_BY_DESCRIPTOR = [
    "os.fchmod(fd, 0o777)",
    "os.chmod(f'/proc/self/fd/{fd}', 0o777)",
    "os.fchown(fd, os.getuid(), os.getgid())",
    "os.utime(fd, (1, 1))",
    "os.setxattr(fd, 'user.x', b'x')",
    "os.removexattr(fd, 'user.kept')",
    "fcntl.ioctl(fd, 0x40086602, struct.pack('l', 0x80))",  # FS_IOC_SETFLAGS
    "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "os.ftruncate(fd, 0)",
    "os.open(owned, os.O_RDONLY | os.O_TRUNC)",
    "os.open(owned, os.O_WRONLY)",
]


def test_removing_the_working_directory_follows_no_link(attacker: Attacker) -> None:
    user = attacker.user
    directory = user.temporary / "tether-sandbox-left"
    closed, unreadable = directory / "closed", directory / "unreadable"
    for folder in (directory, closed, unreadable, unreadable / "folder"):
        folder.mkdir()
    (closed / "link").symlink_to(user.home / "folder")
    (directory / "link").symlink_to(user.home / "folder")
    for path in (directory, *directory.rglob("*")):
        os.chown(path, user.uid, -1, follow_symlinks=False)
    closed.chmod(0o500)
    unreadable.chmod(0)
    before = user.state()
    wait_for(fork(lambda: (become(user.uid), _remove(str(directory)))))
    assert os.listdir(user.temporary) == []
    assert user.state() == before


def test_secrets_of_other_processes_and_files_are_not_read(attacker: Attacker) -> None:
    attacker.need("pid", "landlock", "seccomp")
    ours, home = os.getpid(), str(attacker.user.home)
    attacker.all_fail([
        f"open('/proc/{ours}/environ', 'rb').read()",
        f"open('/proc/{ours}/mem', 'rb')",
        f"open('/proc/{ours}/cmdline').read()",
        "open('/proc/self/environ').read()",
        "open('/proc/1/environ').read()",
        "os.listdir('/proc')",
        f"os.readlink('/proc/{ours}/exe')",
        "assert any('TETHER' in name or 'REDIS' in name for name in os.environ)",
        f"open({home + '/secret'!r}).read()",
        f"os.listdir({home!r})",
        f"os.getxattr({home + '/secret'!r}, 'user.kept')",
        f"os.listxattr({home + '/secret'!r})",
        f"assert libc.inotify_add_watch(libc.inotify_init(), {home.encode()!r}, 0xfff) > 0",
    ])  # fmt: skip


def test_other_processes_are_not_touched(attacker: Attacker) -> None:
    attacker.need("pid", "seccomp")
    ours = os.getpid()
    attacker.all_fail([
        f"os.kill({ours}, 0)",
        f"os.kill({os.getppid()}, signal.SIGKILL)",
        # no effect on the first of a namespace
        "os.kill(os.getppid(), signal.SIGKILL); os.kill(1, signal.SIGKILL); raise OSError",
        f"assert libc.ptrace(16, {ours}, 0, 0) == 0",
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
        f"assert libc.process_vm_readv({ours}, None, 0, None, 0, 0) >= 0",
        f"os.setpriority(os.PRIO_PROCESS, {ours}, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ])  # fmt: skip


def test_no_rights_are_gained(attacker: Attacker) -> None:
    attacker.need("seccomp")
    new_user = 0x10000000
    attacker.all_fail([
        f"assert libc.unshare({new_user}) == 0",
        f"assert libc.syscall(56, {new_user} | 17, 0, 0, 0, 0) > 0",
        "assert libc.syscall(435, 0, 0) > 0",
        "assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0",
        "assert libc.syscall(442, -100, b'/', 0, struct.pack('4Q', 0, 1, 0, 0), 32) == 0",  # mount_setattr
        "assert libc.chroot(b'.') == 0",
        "os.setuid(0)",
        "assert libc.syscall(321, 0, 0, 0) >= 0",
        "assert libc.syscall(323, 1) >= 0",  # userfaultfd
        "assert libc.syscall(425, 8, bytes(120)) >= 0",  # io_uring_setup
        "assert libc.syscall(0x40000000 + 39) > 0",
        "assert libc.prctl(24, 21, 0, 0, 0) == 0 and os.getuid() == 0",
        "assert libc.prctl(4, 0, 0, 0, 0) == 0",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "assert subprocess.run(['/bin/su', '-c', 'true'], stdin=subprocess.DEVNULL).returncode == 0",
    ])  # fmt: skip


def test_honest_code_may_do_what_it_needs(attacker: Attacker) -> None:
    verdict = attacker.run(
        "", "assert subprocess.run(['/bin/true']).returncode == 0",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=int); p.start(); p.join(); "
        "assert p.exitcode == 0",
        "import json, math, re, random, datetime, decimal, collections, itertools, heapq, bisect, functools, "
        "hashlib, unittest",
    )  # fmt: skip
    assert verdict.passed == set(range(6))


def test_missing_isolation_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    python_tests._warn.cache_clear()
    for _ in range(2):
        python_tests._warn(NEEDED - {"landlock", "net"})
    assert capsys.readouterr().err == "sandbox.weak missing=landlock,net (see docs/security.md)\n"
    python_tests._warn(NEEDED)
    assert capsys.readouterr().err == ""


def test_the_interpreter_is_isolated(attacker: Attacker) -> None:
    """The sandbox starts without the code's directory and the user's packages on its path."""
    flags = attacker.run(
        "",
        "assert sys.flags.isolated",
        f"assert {str(ROOT)!r} not in sys.path",
        f"assert sys.executable == {str(attacker.user.home / 'venv' / 'bin' / 'python')!r}",
    )
    assert flags.passed == {0, 1, 2}
