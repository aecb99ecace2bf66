"""Starts a model's ranks as local processes, and calls them from the decoding thread.

Each rank runs a `RankRpcServer` in a given directory, and ends with this process. When a rank ends, all
connections are closed, so that no call waits for ranks that are blocked on the dead rank.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from protocol.errors import EngineError, EngineSettingsError
from protocol.host.child_environment import child_environment
from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.multi_process.rank_rpc import RankRpcClient, socket_path

POLL_S = 0.05
REASON_S = 2.0
"""Seconds to wait for the exit code of a rank whose connection has closed."""
LOG_TAIL = 600
"""Characters of a rank's log to quote in errors."""
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Distributed environment variables that a rank must not inherit."""

T = TypeVar("T")


class RankProcesses:
    """Processes of one engine's ranks. Only `close` may be called from the event loop's thread."""

    def __init__(
        self,
        module: str,
        config: EngineConfig,
        name: str,
        loop: asyncio.AbstractEventLoop,
        file: int,
        python: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start `python -m module DIRECTORY FILE RANK RANKS` for each rank, and connect.

        Args:
            module: module that serves a rank.
            loop: event loop of the connections.
            file: descriptor that the ranks inherit.
            python: interpreter of the ranks; empty: this interpreter.
            variables: additional environment variables of the ranks.

        Raises:
            EngineError: a rank ends, or is not ready within `start_timeout_s`.
            EngineSettingsError: `python` cannot be started.
        """
        self._python, self._variables = python or sys.executable, variables
        self._loop = loop
        self.ended = ""
        """Why the ranks can no longer be called; empty while they can."""
        self.directory = Path(tempfile.mkdtemp(prefix="tether-ranks-"))
        self._client = RankRpcClient(name, self._lost, timeout_s=config.start_timeout_s)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(config.tensor_parallel_size):
                self._processes.append(self._started(module, rank, config.tensor_parallel_size, file))
            self._connect(config.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank and return the results.

        Raises:
            EngineError: a rank raised or has ended.
        """
        try:
            return self.run(self.call_each(method, *arguments))
        except EngineError as error:
            if not self.ended:
                raise
            raise EngineError(f"{error}; {self._reason()}") from error

    async def call_each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank, like `call`, from the event loop."""
        return await self._client.call_each(method, *arguments)

    def close(self) -> None:
        """Kill the processes and remove their files. Idempotent; callable from the event loop's thread."""
        self.ended = self.ended or "the ranks are closed"
        self._loop.call_soon_threadsafe(self._client.close)
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _started(self, module: str, rank: int, ranks: int, file: int) -> "subprocess.Popen[bytes]":
        command = [self._python, "-m", module, str(self.directory), str(file), str(rank), str(ranks)]
        with self._log(rank).open("wb") as log:
            try:
                return subprocess.Popen(
                    command,
                    env=child_environment(
                        {
                            "LOCAL_RANK": str(rank),
                            OWNER: str(os.getpid()),
                            "PYTHONUNBUFFERED": "1",
                            **self._variables,
                        },
                        without=RENDEZVOUS,
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(file,),
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineSettingsError(
                    f"setting engine.python: {self._python}: {error.strerror}"
                ) from error

    def _connect(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        paths = [socket_path(self.directory, rank) for rank in range(len(self._processes))]
        while not all(path.exists() for path in paths):
            if why := self._dead():
                raise EngineError(why)
            if time.monotonic() > deadline:
                raise EngineError(f"the ranks did not start within {timeout_s:g} s{self.log_tail(0)}")
            time.sleep(POLL_S)
        self.run(self._client.connect(paths))

    def _lost(self) -> None:
        """Record that a rank has ended, and fail the calls that wait for other ranks."""
        self.ended = self._dead() or "a rank has closed its connection"
        self._client.close()

    def _reason(self) -> str:
        """Return which rank has ended; a connection closes slightly before its process exits."""
        deadline = time.monotonic() + REASON_S
        while not (found := self._dead()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.ended = found or self.ended
        return self.ended

    def _dead(self) -> str:
        """Return which rank has ended, with the end of its log; empty if all run."""
        for rank, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                return f"rank {rank} has ended with code {code}{self.log_tail(rank)}"
        return ""

    def _log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def log_tail(self, rank: int) -> str:
        """Return the end of a rank's log, formatted for an error."""
        with suppress(OSError):
            lines = self._log(rank).read_text(errors="replace").splitlines()
            return f"; its log: {' / '.join(line.strip() for line in lines[-8:])[-LOG_TAIL:]}"
        return ""
