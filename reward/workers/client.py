"""Starts, queries and ends one worker process, for the pool."""

import asyncio
import contextlib
import logging
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.host.process_tree import kill_process_tree
from reward.config import RewardConfig
from reward.workers.outcome import CallOutcome, GroupFrame

LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 22
"""Limit on a frame from a worker, bytes: it holds numbers, of each turn at most, or a short text."""
EXIT_S = 2.0
"""Time for a process that has closed its pipe to exit by itself."""
log = logging.getLogger("tether.reward")
ROOT = Path(__file__).resolve().parents[2]


class WorkerClient:
    """A worker process, which answers one call at a time.

    If `healthy` is False after `call` has ended, the process must be replaced.
    """

    def __init__(self, process: Process, config: RewardConfig) -> None:
        self._process, self._config = process, config
        self._group: GroupFrame | None = None
        self.healthy = True
        self.at_once: Sequence[bool] = ()
        """For each verifier, whether one call takes all samples of a group."""
        self.awaits: Sequence[bool] = ()
        """For each verifier, whether it waits, and so runs in an `AsyncWorkerClient`."""
        self.by_turn: Sequence[bool] = ()
        """For each verifier, whether it scores turns."""

    @classmethod
    async def start(cls, config: RewardConfig, modules: Sequence[str] = ()) -> "WorkerClient":
        """Start a worker and wait until it has imported its verifiers; cancelling the call ends the process.

        Args:
            config: the section.
            modules: directories with modules of the user, which are searched last.

        Raises:
            SettingsError: a verifier's name or options are wrong.
            RewardError: the worker was not ready within `start_timeout_s`.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "reward.workers.worker",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            env=worker_environment(),
        )
        worker = cls(process, config)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                verifiers = [[verifier.name, verifier.options] for verifier in config.verifiers]
                frame = [config.memory_mb, config.timeout_s, list(modules), verifiers]
                await worker._send(msgspec.msgpack.encode(frame))
                kind, *rest = await worker._receive()
        except TimeoutError:
            await worker.end()
            raise RewardError(
                f"a reward worker was not ready within reward.start_timeout_s {config.start_timeout_s}"
            ) from None
        except (EOFError, OSError) as error:
            code = await worker._exit_code()
            raise RewardError(f"a reward worker ended while starting, exit code {code}") from error
        except BaseException:
            await worker.end()
            raise
        if kind == "settings":
            await worker.end()
            raise SettingsError(rest[0])
        worker.at_once, worker.awaits, worker.by_turn = rest
        return worker

    async def call(self, group: GroupFrame, verifier: int, samples: Sequence[int]) -> CallOutcome:
        """Return the outcome of one verifier on samples of a group.

        Args:
            group: sent once for consecutive calls with it.
            verifier: number of the verifier in the settings.
            samples: numbers of the samples.

        Returns:
            The outcome. The worker stays healthy if the verifier raised, but not if it was late or crashed.
        """
        self.healthy = False  # until the whole answer has been read, even if this call is cancelled
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if group is not self._group:
                    await self._send(group.data)
                    self._group = group
                await self._send(msgspec.msgpack.encode(["call", verifier, samples]))
                kind, value = await self._receive()
            if kind == "error":
                self.healthy = True
                return CallOutcome([], error=str(value))
            scores = msgspec.convert(value, list[float | list[float]])
            if len(scores) != len(samples):
                raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
        except TimeoutError:
            return CallOutcome([None] * len(samples))
        except (EOFError, OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            code = await self._exit_code()
            log.warning("score.worker_ended code=%s error=%s", code, error)
            return CallOutcome([], error=f"the worker process ended, exit code {code}")
        self.healthy = True
        return CallOutcome(scores)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        self.healthy = False
        if self._process.returncode is None:
            kill_process_tree(self._process.pid)

    async def end(self) -> int:
        """Kill the process and return its exit code; not to be called while `score` runs. Idempotent."""
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = await self._process.wait()
        await self._drain()
        return code

    async def _exit_code(self) -> int:
        """Return the exit code of a process that has closed its pipe; kill it if it does not exit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        return await self.end()

    async def _drain(self) -> None:
        """Read to the end of the stream, so that the transport closes."""
        assert self._process.stdout is not None
        while await self._process.stdout.read(MAX_FRAME):
            pass

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        await self._process.stdin.drain()

    async def _receive(self) -> list[Any]:
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ValueError(f"frame of {length} bytes from a reward worker")
        return msgspec.msgpack.decode(await self._process.stdout.readexactly(length), type=list[Any])


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker process, which imports our packages from where they are."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Verifiers need no settings, which may contain passwords.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TETHER_")}
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
