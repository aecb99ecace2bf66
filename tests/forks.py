"""Plugin of pytest (`-p tests.forks --forks N`): tests in copies of the process that has collected them.

Collecting takes half a minute, so one process does it. Tests that start services wait for half of their time,
so N more copies, the guests, begin a test whenever a core is idle. GPU tests use pytest-xdist: CUDA does not
survive a fork.
"""

import atexit
import fcntl
import gc
import marshal
import os
import selectors
import signal
import struct
import termios
import traceback
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, BinaryIO

import psutil
import pytest
from _pytest.scope import Scope

from protocol.host.parent_death import die_with_parent

Unit = Sequence[pytest.Item]
INDEX = struct.Struct("=i")
LENGTH = struct.Struct("=q")
END = LENGTH.pack(0)
"""Follows the last report of a process. The pipe's end would not do: forked processes hold it open."""
IDLE_S = 0.5
"""How long a core must have been idle before a guest begins a test."""
ROOM_BYTES = 4 << 30
"""Free memory that a guest leaves to the others: the largest engine of a test needs less."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, help="processes that always run tests; as many are guests"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    forks = session.config.getoption("--forks")
    if not forks or session.config.option.collectonly or session.testsfailed:
        return None
    units = units_of(session.items)
    gc.collect()
    gc.freeze()  # no fork looks through what was imported, nor copies its pages
    queue = Queue(len(units))
    workers = [Worker(session, queue, units, guest=number >= forks) for number in range(2 * forks)]
    try:
        reported = follow(session, queue, workers)
    finally:
        codes = [worker.end() for worker in workers]
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    for item in session.items:
        if item.nodeid not in reported:
            session.config.hook.pytest_runtest_logreport(report=lost(item, codes))
    if any(codes):
        session.shouldfail = f"exit codes of the processes of tests: {codes}"
        raise session.Failed(session.shouldfail)
    return True


def units_of(items: Sequence[pytest.Item]) -> list[Unit]:
    """Return the tests by the process that runs them in a row, the longest list first.

    Tests of one `xdist_group` are a unit, and tests of a module that share a fixture; others run alone.
    """
    units: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        units[name_of_unit(item)].append(item)
    return sorted(units.values(), key=len, reverse=True)


def name_of_unit(item: pytest.Item) -> str:
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    definitions = item._fixtureinfo.name2fixturedefs.values()
    shared = any(Scope.Function < each[-1]._scope < Scope.Session for each in definitions if each)
    return item.nodeid.split("::")[0] if shared else item.nodeid


class Queue:
    """Numbers of units in a pipe: each is read by one process, and at the end of the file none is left."""

    def __init__(self, count: int) -> None:
        self._read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, max(4096, count * INDEX.size))
        os.write(write, b"".join(map(INDEX.pack, range(count))))
        os.close(write)

    def take(self) -> int | None:
        """Return the next number; none if there is none left."""
        data = os.read(self._read, INDEX.size)
        return INDEX.unpack(data)[0] if data else None

    @property
    def left(self) -> int:
        """How many units no process has begun."""
        size = fcntl.ioctl(self._read, termios.FIONREAD, bytes(4))
        return int.from_bytes(size, "little") // INDEX.size

    def clear(self) -> None:
        """Let every process end after the unit that it has."""
        while self.take() is not None:
            pass


class Worker:
    """A copy of this process that runs units until none is left, as its parent sees it."""

    def __init__(self, session: pytest.Session, queue: Queue, units: Sequence[Unit], *, guest: bool) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            die_with_parent(signal.SIGINT)  # as Ctrl-C: tests end what they started
            os.close(read)
            run_and_exit(session, queue, units, os.fdopen(write, "wb"), guest=guest)
        os.close(write)
        self.reports = os.fdopen(read, "rb", 0)  # a buffer would hide reports from the selector

    def next_report(self) -> dict[str, Any] | None:
        """Return the next report, as pytest serializes it; none after the last one."""
        body = self._read(LENGTH.unpack(self._read(LENGTH.size) or END)[0])
        return marshal.loads(body) if body else None

    def _read(self, size: int) -> bytes:
        """Return so many bytes; none if the process has ended before them."""
        data = b""
        while len(data) < size:
            more = self.reports.read(size - len(data))
            if not more:
                return b""
            data += more
        return data

    def end(self) -> int:
        """End the process, if it has not closed its end by itself, and return its exit code."""
        if not self.reports.closed:
            os.kill(self.pid, signal.SIGINT)
            self.reports.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def follow(session: pytest.Session, queue: Queue, workers: Sequence[Worker]) -> set[str]:
    """Hand the reports of all processes to this process's plugins, and return the tests that ended."""
    reported: set[str] = set()
    hook = session.config.hook
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.reports, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                data = key.data.next_report()
                if data is None:
                    selector.unregister(key.fileobj)
                    key.data.reports.close()
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    reported.add(report.nodeid)
            if session.shouldfail or session.shouldstop:
                queue.clear()
    return reported


def lost(item: pytest.Item, codes: Sequence[int]) -> pytest.TestReport:
    """Return the failure of a test whose process ended before it."""
    text = f"its process ended before it did; exit codes of all processes: {list(codes)}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


class Reports:
    """Sends reports to the parent."""

    def __init__(self, config: pytest.Config, file: BinaryIO) -> None:
        self._config, self._file = config, file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        body = marshal.dumps(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
        self._file.write(LENGTH.pack(len(body)) + body)
        self._file.flush()


def run_and_exit(
    session: pytest.Session, queue: Queue, units: Sequence[Unit], file: BinaryIO, *, guest: bool
) -> None:
    """Run units in this copy, and leave it without the parent's end of a session."""
    code = 1
    try:
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(Reports(session.config, file))
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are the parent's, with the parent's positions in them
        capture.start_global_capturing()
        between: Any = SimpleNamespace(listchain=lambda: [session])  # keeps the session's fixtures alone
        while (not guest or admitted(queue)) and (index := queue.take()) is not None:
            for item, following in pairwise([*units[index], between]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        session._setupstate.teardown_exact(None)
        file.write(END)
        file.flush()
        capture.stop_global_capturing()
        atexit._run_exitfuncs()
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        capture.stop_global_capturing()
        traceback.print_exc()
    finally:
        os._exit(code)


def admitted(queue: Queue) -> bool:
    """Wait until a core is idle and memory is free; false if all units were begun meanwhile."""
    while queue.left:
        idle = psutil.cpu_count() * (1 - psutil.cpu_percent(IDLE_S) / 100)
        if idle > 0.5 and psutil.virtual_memory().available > ROOM_BYTES:
            return True
    return False
