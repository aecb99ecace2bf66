"""The list of system calls: what is not on it is refused, and ordinary programs find on it what they need."""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sympy

from reward.sandbox.child import PR_SET_NO_NEW_PRIVS, fork, libc, seccomp
from reward.sandbox.runner import Limits, run_tests
from reward.sandbox.system_calls import ALLOWED, CHECKED, OWN_FILES, seccomp_filter
from tests.security.sandbox_user import UIDS, SandboxUser, sandbox_user

pytestmark = pytest.mark.xdist_group("sandbox")

LIMITS = Limits(wall_s=120.0, cpu_s=30, memory_mb=1024, file_mb=32, processes=16)
PYTHON = [
    "import tempfile; tempfile.mkdtemp(); tempfile.TemporaryDirectory().cleanup(); "
    "tempfile.NamedTemporaryFile().write(b'1'); tempfile.TemporaryFile().write(b'1')",
    "import shutil; open('a', 'w').write('1'); shutil.copyfile('a', 'b'); shutil.copy('a', 'c'); "
    "shutil.copy2('a', 'd')",
    "import os, shutil; os.makedirs('x/y'); shutil.copytree('x', 'w'); shutil.move('w', 'v'); "
    "shutil.make_archive('archive', 'gztar', 'v'); shutil.unpack_archive('archive.tar.gz', 'u')",
    "import subprocess; assert subprocess.check_output(['cat'], input=b'x') == b'x'; "
    "assert subprocess.getoutput('echo 1') == '1'",
    "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "import multiprocessing as m; c = m.get_context('fork'); a, b = c.Pipe(); "
    "p = c.Process(target=b.send, args=(1,)); p.start(); assert a.recv() == 1; p.join()",
    "import asyncio\nasync def f(): return await (await asyncio.create_subprocess_exec('true')).wait()\n"
    "assert asyncio.run(f()) == 0",
    "import pathlib; p = pathlib.Path('p'); p.touch(); p.touch(); p.chmod(0o700); "
    "assert p.stat().st_mode & 0o777 == 0o700",
    "import os; open('t', 'w').write('12'); os.utime('t', (1, 1)); assert os.stat('t').st_mtime == 1; "
    "os.truncate('t', 1); os.nice(0)",
    "import sqlite3; c = sqlite3.connect('db'); c.execute('pragma journal_mode = wal'); "
    "c.execute('create table t(x)'); c.commit(); c.close()",
    "import signal; signal.signal(signal.SIGALRM, print); signal.setitimer(0, 0.01); signal.pause()",
    "import mmap; mmap.mmap(-1, 4096)[0] = 1; open('m', 'wb').write(bytes(8192)); "
    "f = open('m', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 2; m.flush(); m.resize(16384)",
    "import fcntl; f = open('l', 'w'); fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)",
    "import socket; a, b = socket.socketpair(); a.sendall(b'1'); assert b.recv(1) == b'1'",
    "import venv; venv.create('venv')",
    "import csv, ctypes, decimal, fractions, gzip, json, logging, lzma, platform, random, re, resource, "
    "secrets, ssl, statistics, unittest, uuid, zipfile, zoneinfo; resource.getrlimit(resource.RLIMIT_AS)",
]
SHELL = {
    "touch a; touch a; mkdir -p d/e; cp -r d f; cp -a d g; cp -p a b; mv g h; ln -s a l; ln a m; ls -la": (),
    "mkfifo q; (echo hi > q &); cat q; cat <(echo sub); seq 9 | sort -rn | head -3 | tail -1 | tr 7 8": (),
    r"printf '#!/bin/sh\necho hi\n' > s; chmod +x s; ./s; install -m 755 s t; truncate -s 9 u; cp u v": (),
    "mktemp; date; du -sh .; stat s; md5sum s; timeout 5 true; nice true; sleep 0.01 & wait": (),
    "echo abc > i; sed -i s/b/x/ i; grep axc i; find . -print0 | xargs -0 ls -d; awk '{print $1}' i": (),
    "mkdir z; tar czf z.tgz z; rm -r z; tar xzf z.tgz; test -d z; gzip i; gunzip i.gz": (),
    r"printf 'all:\n\ttouch made\n' > Makefile; make; test -f made": ("make",),
    "echo 'int main(){return 0;}' > c.c; gcc c.c -o c; ./c": ("gcc",),
    'perl -e \'open F, ">p"; chmod 0700, "p"; system("true") == 0 or die\'': ("perl",),
    "git init -q r; cd r; git config user.email a@b; git config user.name n; touch a; git add a; "
    "git commit -qm m; git checkout -qb b; git status; cd ..; git clone -q r r2; test -f r2/a": ("git",),
}
"""Command line -> programs of it that a machine may lack."""


@pytest.fixture(scope="module", params=UIDS, ids=lambda uid: "user" if uid else "root")
def user(request: pytest.FixtureRequest) -> Iterator[SandboxUser]:
    with sandbox_user(request.param) as user:
        yield user


def test_ordinary_python_programs_run(user: SandboxUser) -> None:
    verdict = user.run("", *PYTHON, limits=LIMITS)
    assert [test for i, test in enumerate(PYTHON) if i not in verdict.passed] == []


def test_ordinary_command_lines_run(user: SandboxUser) -> None:
    lines = [line for line, programs in SHELL.items() if all(map(shutil.which, programs))]
    bash = "import subprocess\ndef run(line):\n    subprocess.run(['bash', '-ec', line], check=True)\n"
    verdict = user.run(bash, *(f"run({line!r})" for line in lines), limits=LIMITS)
    assert [line for i, line in enumerate(lines) if i not in verdict.passed] == []


def test_programs_that_set_modes_or_times_fail_without_namespaces(user: SandboxUser) -> None:
    bash = "import shutil, subprocess, tempfile\nopen('a', 'w').write('1')\ntempfile.mkdtemp(dir='.')\n"
    bash += "def run(line):\n    subprocess.run(['bash', '-ec', line], check=True)\n"
    succeed = ["tempfile.NamedTemporaryFile().write(b'1'); tempfile.TemporaryDirectory().cleanup()"]
    succeed += ["shutil.copyfile('a', 'b'); shutil.move('b', 'c')", "run('cp a d; mv d e; sed -i s/1/2/ e')"]
    fail = ["shutil.copy('a', 'f')", "shutil.copytree('.', 'g')"]
    lines = ["touch a", "chmod +x a", "cp -p a h", "tar cf i a; tar xf i", "git init -q ."]
    fail += [f"run({line!r})" for line in lines]
    verdict = replace(user, namespaces=False).run(bash, *succeed, *fail, limits=LIMITS)
    assert verdict.passed == set(range(len(succeed)))


def test_numpy_and_sympy_run() -> None:
    if not all(Path(str(module.__file__)).is_relative_to(sys.prefix) for module in (np, sympy)):
        pytest.skip("they are outside of the environment, where the sandbox does not read")
    tests = [
        "import numpy as np; a = np.ones((64, 64)); np.linalg.eigh(a @ a); np.save('a', a); "
        "np.load('a.npy', mmap_mode='r')",
        "import sympy; x = sympy.Symbol('x'); assert sympy.integrate(x**2, x) == x**3 / 3",
    ]
    assert run_tests("", tests, LIMITS).passed == {0, 1}


def under_filter(own_files: bool, work: Callable[[], None]) -> int:
    """Do something in a process under the filter; return its exit code."""

    def confined() -> None:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if not seccomp(seccomp_filter(own_files)):
            os._exit(9)
        work()

    code = os.waitstatus_to_exitcode(os.waitpid(fork(confined), 0)[1])
    if code == 9:
        pytest.skip("there are no seccomp filters, or none for this processor")
    return code


def test_every_call_that_is_not_listed_is_refused() -> None:
    listed = {*ALLOWED.values(), *CHECKED}
    unfiltered = {335, 336}  # uretprobe, uprobe: the kernel passes them by the filter, and they raise SIGILL

    def call_all() -> None:
        for number in set(range(600)) - listed - unfiltered:
            if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1:
                raise AssertionError(number)
            if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
                raise AssertionError(number)

    assert under_filter(False, call_all) == 0


def test_modes_of_own_files_are_changed_only_where_that_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    assert under_filter(False, lambda: file.chmod(0o700)) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    assert under_filter(True, lambda: file.chmod(0o700)) == 0
    assert file.stat().st_mode & 0o777 == 0o700


def test_tables_do_not_overlap_or_repeat() -> None:
    numbers = [*ALLOWED.values(), *OWN_FILES.values(), *CHECKED]
    assert len(numbers) == len(set(numbers))
