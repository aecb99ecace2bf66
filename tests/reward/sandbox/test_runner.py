"""The sandbox against hostile code; skipped where the kernel lacks what a test needs."""

import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from protocol.errors import RewardError, SettingsError
from reward.sandbox.child import fork, wait_for
from reward.sandbox.runner import IsolationLevel, Limits, Verdict, run_programs, run_tests
from reward.verifiers.registry import make_verifier

pytestmark = pytest.mark.xdist_group(
    "sandbox"
)  # its tests look at what is left in the shared temporary directory

LIMITS = Limits(wall_s=20.0, cpu_s=1, memory_mb=256, file_mb=1, processes=4)
FINE = "f = lambda x: 2 * x"
WORKS = "assert f(2) == 4"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test there are no processes and no directories that were not there before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = leftovers()
    yield
    assert leftovers() <= before  # what other tests have left may end meanwhile


def leftovers() -> set[int | str]:
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    return children | {
        name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tether-sandbox-")
    }


def run(code: str, *tests: str, limits: Limits = LIMITS) -> Verdict:
    return run_tests(code, list(tests) or [WORKS], limits)


@pytest.fixture(scope="module")
def isolation() -> frozenset[str]:
    return run(FINE).isolation


def needs(kind: str, isolation: frozenset[str]) -> None:
    if kind not in isolation:
        pytest.skip(f"this kernel offers no {kind}")


def test_every_test_is_judged_by_itself() -> None:
    verdict = run(
        FINE,
        WORKS,
        "assert f(2) == 5",
        "1 / 0",
        "import json; assert json.dumps(f(1)) == '2'",
        "syntax error",
        "exit()",
    )
    assert verdict.passed == {0, 3}
    assert not verdict.timed_out


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def f(x:",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "x = bytearray(10**9)",
        "x = []\nwhile True: x.append('a' * 10**6)",
        "open('big', 'wb').write(b'x' * (2 << 20))",
        "while True: pass",
        "\x00",
    ],
)
def test_code_that_fails_or_exceeds_a_limit_has_not_passed(code: str) -> None:
    assert run(f"{code}\n{FINE}").passed == frozenset()


def test_code_that_waits_is_ended_when_its_time_is_up() -> None:
    verdict = run("import time; time.sleep(3600)", limits=Limits(wall_s=0.5))
    assert verdict.timed_out
    assert not verdict.passed


def test_a_report_without_end_is_cut_off() -> None:
    endless = (
        "import os\nfor fd in range(3, 20):\n    try:\n        while True: os.write(fd, b'x' * 4096)\n"
        "    except OSError: pass"
    )
    assert run(endless).passed == frozenset()


def test_a_report_forged_by_the_code_is_ignored() -> None:
    forged = (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\n0\\nisolation\\nabc 0\\n')\n"
        "    except OSError: pass\nos._exit(0)"
    )
    assert run(forged).passed == frozenset()


def test_a_fork_bomb_is_limited() -> None:
    bomb = (
        "import os, time\nforked = 0\ntry:\n    while forked < 100:\n"
        "        if os.fork() == 0:\n            time.sleep(3600)\n"
        "        forked += 1\nexcept OSError:\n    pass"
    )
    assert run(bomb, "assert 0 < forked <= 4, forked").passed == {0}


def test_processes_that_leave_the_group_end_too() -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(3600)\n    os._exit(0)\n"
    )
    assert run(daemon + FINE).passed == {0}
    assert run(daemon + "time.sleep(3600)", limits=Limits(wall_s=0.5)).timed_out


def test_threads_that_keep_running_do_not_delay_the_end() -> None:
    assert run(
        f"import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n{FINE}"
    ).passed == {0}


def test_a_directory_that_cannot_be_read_is_removed() -> None:
    assert run(
        "import os\nos.makedirs('d/e')\nopen('d/e/f', 'w').close()\n"
        f"os.chmod('d/e', 0)\nos.chmod('d', 0)\n{FINE}"
    ).passed == {0}


def test_the_environment_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    assert run(
        "import os", "assert 'SECRET' not in os.environ", "assert os.getcwd() == os.environ['HOME']"
    ).passed == {0, 1}


def test_files_are_written_in_the_working_directory_only(tmp_path: Path, isolation: frozenset[str]) -> None:
    needs("landlock", isolation)
    (tmp_path / "there").write_text("old")
    tmp_path.chmod(0o777)
    (tmp_path / "there").chmod(0o666)
    verdict = run(
        "",
        "open('here', 'w').write('x'); assert open('here').read() == 'x'",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(tmp_path / 'there')!r}, 'a').write('x')",
        f"import os; os.unlink({str(tmp_path / 'there')!r})",
        f"import os; os.mkdir({str(tmp_path / 'dir')!r})",
        "open('/dev/shm/tether-escape', 'w')",
    )
    assert verdict.passed == {0}
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "old"


def test_other_files_are_not_read(tmp_path: Path, isolation: frozenset[str]) -> None:
    needs("landlock", isolation)
    secret = tmp_path / "secret"
    secret.write_text("x")
    verdict = run(
        "",
        f"open({str(secret)!r})",
        "open('/etc/passwd')",
        f"open('/proc/{os.getpid()}/environ')",
        "open('/proc/1/environ')",
    )
    assert verdict.passed == frozenset()


def test_all_files_together_are_limited(isolation: frozenset[str]) -> None:
    needs("tmpfs", isolation)
    fill = (
        "n = 0\ntry:\n    while n < 64:\n        open(f'f{n}', 'wb').write(bytes(1 << 18))\n        n += 1\n"
        "except OSError:\n    pass"
    )
    assert run(fill, "assert 2 <= n <= 4, n").passed == {0}


def test_there_is_no_network(isolation: frozenset[str]) -> None:
    needs("net", isolation)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert run("import socket", f"socket.create_connection({address!r}, 5)").passed == frozenset()


def test_other_processes_are_out_of_reach(isolation: frozenset[str]) -> None:
    needs("pid", isolation)
    code = (
        f"import os, signal\ntry:\n    os.kill({os.getpid()}, 0)\n    reached = True\n"
        "except OSError:\n    reached = False"
    )
    assert run(code, "assert not reached").passed == {0}
    assert run("import os\nos.kill(-1, 9)").passed == frozenset()


def test_isolation_may_be_required(isolation: frozenset[str]) -> None:
    strict = Limits(isolation=IsolationLevel.REQUIRED)
    if {"pid", "net", "tmpfs", "landlock"} <= isolation:
        assert run(FINE, limits=strict).passed == {0}
    else:
        with pytest.raises(RewardError, match="isolation is required"):
            run(FINE, limits=strict)


def test_a_sandbox_that_cannot_be_set_up_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(RewardError, match="the sandbox cannot be set up: OverflowError"):
        run(FINE, limits=Limits(memory_mb=1 << 60))


def test_limits_must_be_above_zero() -> None:
    with pytest.raises(SettingsError, match=r"option limits\.memory_mb: -5 is not above 0"):
        make_verifier("python_tests", {"limits": {"memory_mb": -5}})
    with pytest.raises(SettingsError, match="did you mean 'wall_s'"):
        make_verifier("python_tests", {"limits": {"walls": 5}})


def test_a_failing_child_says_why_and_does_not_return(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no such thing")

    works: list[Callable[[], None]] = [fail]
    wait_for(fork(works[0]))
    assert "no such thing" in capfd.readouterr().err


def test_a_process_with_thousands_of_open_files_runs_code(many_files: None) -> None:
    assert run_tests(FINE, [WORKS], LIMITS).passed == frozenset({0})


@pytest.fixture
def many_files() -> Iterator[None]:
    """Have more files open than `select` takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    with ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_runs_under_the_python_that_runs_this_one() -> None:
    """As root a home directory's Python is read by a capability, which a program that is started keeps."""
    code = "import sys; print([sys.version, sys.base_prefix])"
    printed = json.dumps(f"{[sys.version, sys.base_prefix]}\n")
    assert run_programs(code, [""], LIMITS).outputs == {0: printed}
