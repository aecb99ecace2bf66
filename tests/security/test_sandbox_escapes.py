"""Code that tries to get out of the sandbox, by the ways there are. What needs the kernel's help is skipped
where it does not give it."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward.sandbox.runner import NEEDED, Limits, Verdict, run_tests
from reward.verifiers import python_tests
from tests.reward.sandbox.test_runner import leftovers

pytestmark = pytest.mark.xdist_group("sandbox")

LIMITS = Limits(wall_s=20.0, cpu_s=2, memory_mb=256, file_mb=1, processes=6)
HEAD = "import ctypes, os, signal, socket, subprocess, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() <= before  # what other tests have left may end meanwhile


@pytest.fixture(scope="module")
def isolation() -> frozenset[str]:
    return run("", "pass").isolation


def run(code: str, *tests: str, limits: Limits = LIMITS) -> Verdict:
    return run_tests(HEAD + code, list(tests), limits)


def need(isolation: frozenset[str], *kinds: str) -> None:
    missing = {*kinds} - isolation
    if missing:
        pytest.skip(f"this kernel offers no {', '.join(sorted(missing))}")


def all_fail(attempts: list[str], code: str = "") -> None:
    """Each attempt, and then one that works, so that it is the attempt that fails and not the sandbox."""
    verdict = run(code, *attempts, "assert 1 + 1 == 2")
    escaped = [attempts[i] for i in verdict.passed if i < len(attempts)]
    assert escaped == []
    assert verdict.passed == {len(attempts)}


def test_an_endless_fork_bomb_ends() -> None:
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert run(bomb, "pass", limits=Limits(wall_s=3.0, cpu_s=1, processes=6)).passed == frozenset()


def test_a_bomb_that_renews_itself_ends() -> None:
    bomb = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    try:\n"
    bomb += "        if os.fork():\n            os.setsid()\n            os._exit(0)\n"
    bomb += "    except OSError:\n        pass\n"
    assert run(bomb, "pass", limits=Limits(wall_s=3.0, cpu_s=1, processes=6)).passed == frozenset()


def test_memory_is_limited_in_every_process() -> None:
    bomb = "def bomb():\n    if os.fork() == 0:\n        try:\n"
    bomb += "            x = bytearray(512 << 20)\n            os._exit(0)\n"
    bomb += "        except MemoryError:\n            os._exit(7)\n"
    bomb += "    return os.waitstatus_to_exitcode(os.wait()[1])\n"
    assert run(bomb, "assert bomb() == 7", "assert bomb() == 7").passed == {0, 1}


def test_there_is_no_memory_that_is_not_counted(isolation: frozenset[str]) -> None:
    need(isolation, "seccomp")
    all_fail([
        "os.memfd_create('x')",
        "assert libc.shmget(0, 1 << 20, 0o1600) >= 0",
        "assert libc.msgget(0, 0o1600) >= 0",
        "assert libc.semget(0, 1, 0o1600) >= 0",
    ])  # fmt: skip


def test_there_is_no_socket(isolation: frozenset[str], tmp_path: Path) -> None:
    need(isolation, "net", "seccomp")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "s"))
        local.listen()
        tmp_path.chmod(0o777)
        (tmp_path / "s").chmod(0o777)
        all_fail([
            f"socket.create_connection({server.getsockname()!r}, 5)",
            "socket.create_server(('0.0.0.0', 0))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        ])  # fmt: skip


def test_links_lead_nowhere(isolation: frozenset[str], tmp_path: Path) -> None:
    need(isolation, "landlock", "tmpfs")
    tmp_path.chmod(0o777)
    target = tmp_path / "target"
    target.write_text("old")
    target.chmod(0o666)
    all_fail([
        f"os.symlink({str(target)!r}, 'to'); open('to').read()",
        f"os.symlink({str(target)!r}, 'also'); open('also', 'a').write('x')",
        f"os.symlink({str(tmp_path)!r}, 'dir'); os.mkdir('dir/new')",
        f"os.link({str(target)!r}, 'hard')",
        f"open('mine', 'w').close(); os.rename('mine', {str(tmp_path / 'mine')!r})",
        f"os.truncate({str(target)!r}, 0)",
        f"os.symlink('/proc/self/root{target}', 'proc'); open('proc').read()",
        "os.chdir('..'); open('here', 'w')",
        "open('/dev/shm/tether-escape', 'w')",
        f"open({str(Path(__file__).parents[2] / 'README.md')!r})",
    ])  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "old"


def test_secrets_of_other_processes_are_not_read(isolation: frozenset[str]) -> None:
    need(isolation, "pid", "landlock")
    ours = os.getpid()
    all_fail([
        f"open('/proc/{ours}/environ', 'rb').read()",
        f"open('/proc/{ours}/mem', 'rb')",
        f"open('/proc/{ours}/cmdline').read()",
        "open('/proc/self/environ').read()",
        "open('/proc/1/environ').read()",
        "os.listdir('/proc')",
        f"os.readlink('/proc/{ours}/exe')",
        "assert any('TETHER' in name or 'REDIS' in name for name in os.environ)",
    ])  # fmt: skip


def test_other_processes_are_not_touched(isolation: frozenset[str]) -> None:
    need(isolation, "pid", "seccomp")
    ours = os.getpid()
    all_fail([
        f"os.kill({ours}, 0)",
        f"os.kill({os.getppid()}, signal.SIGKILL)",
        # no effect on the first of a namespace
        "os.kill(os.getppid(), signal.SIGKILL); os.kill(1, signal.SIGKILL); raise OSError",
        f"assert libc.ptrace(16, {ours}, 0, 0) == 0",
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
        f"assert libc.process_vm_readv({ours}, None, 0, None, 0, 0) >= 0",
        f"os.setpriority(os.PRIO_PROCESS, {ours}, 19)",
    ])  # fmt: skip


def test_no_rights_are_gained(isolation: frozenset[str]) -> None:
    need(isolation, "seccomp")
    new_user = 0x10000000
    all_fail([
        f"assert libc.unshare({new_user}) == 0",
        f"assert libc.syscall(56, {new_user} | 17, 0, 0, 0, 0) > 0",
        "assert libc.syscall(435, 0, 0) > 0",
        "assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0",
        "assert libc.chroot(b'.') == 0",
        "os.setuid(0)",
        "assert libc.syscall(321, 0, 0, 0) >= 0",
        "assert libc.syscall(0x40000000 + 39) > 0",
        "assert libc.prctl(24, 21, 0, 0, 0) == 0 and os.getuid() == 0",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "assert subprocess.run(['/bin/su', '-c', 'true'], stdin=subprocess.DEVNULL).returncode == 0",
    ])  # fmt: skip


def test_honest_code_may_do_what_it_needs() -> None:
    verdict = run(
        "", "assert subprocess.run(['/bin/true']).returncode == 0",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=int)\n"
        "p.start(); p.join(); assert p.exitcode == 0",
        "import json, math, re, random, datetime, decimal, collections, itertools, heapq, bisect\n"
        "import functools, hashlib, unittest",
    )  # fmt: skip
    assert verdict.passed == set(range(6))


def test_a_machine_that_offers_less_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    python_tests._warn.cache_clear()
    for _ in range(2):
        python_tests._warn(NEEDED - {"landlock", "net"})
    assert capsys.readouterr().err == "sandbox.weak missing=landlock,net (see docs/security.md)\n"
    python_tests._warn(NEEDED)
    assert capsys.readouterr().err == ""


def test_the_interpreter_is_isolated() -> None:
    """The code's own directory and the user's packages are not on the path that the sandbox itself starts
    with."""
    flags = run(
        "",
        "assert sys.flags.isolated",
        f"assert {os.getcwd()!r} not in sys.path",
        f"assert sys.executable == {sys.executable!r}",
    )
    assert flags.passed == {0, 1, 2}
