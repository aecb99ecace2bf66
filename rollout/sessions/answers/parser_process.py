"""Runs vLLM's or SGLang's answer parsers in a child process, with one line of JSON per answer.

The worker needs neither library, and SGLang may be installed in another interpreter. If a parser hangs, the
answer stays plain text and the process restarts, so sessions continue.
"""

import asyncio
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from protocol.errors import SettingsError
from protocol.host.child_environment import child_environment
from rollout.off_loop import off_loop, size_of

_log = logging.getLogger("tether.sessions")

MODULES = {"vllm": "rollout.engines.vllm.answer_parser", "sglang": "rollout.engines.sglang.answer_parser"}
"""Engine -> module that runs the engine's parsers."""
START_S = 300.0
"""Timeout of the child's start, seconds; importing an engine takes seconds on an idle machine."""
PARSE_S = 10.0
"""Timeout of parsing one answer, seconds."""
MAX_LINE = 2**26
"""Maximum size of one parsed answer, bytes."""


class ParserProcess:
    """Child process that parses one answer at a time; started with the first answer."""

    def __init__(
        self, engine: str, names: Mapping[str, str], python: str, variables: Mapping[str, str]
    ) -> None:
        """Create a process that is not started.

        Args:
            engine: one of `MODULES`.
            names: names of the `tools` and `reasoning` parsers; empty: none.
            python: interpreter with SGLang; empty: this interpreter.
            variables: environment variables for SGLang.
        """
        self._engine, self._names = engine, dict(names)
        self._command = [
            (python if engine == "sglang" else "") or sys.executable, "-m", MODULES[engine],
        ]  # fmt: skip
        libraries = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._environment = child_environment(libraries | (dict(variables) if engine == "sglang" else {}))
        self._process: asyncio.subprocess.Process | None = None
        self._request_lock = asyncio.Lock()
        self._numbers = itertools.count()

    def check(self, model_dir: str) -> None:
        """Start a process, wait until it is ready, and end it.

        Raises:
            SettingsError: the process cannot start, or a parser is unknown or rejects the tokenizer.
        """
        line = json.dumps({**self._names, "model_dir": model_dir}) + "\n"
        try:
            ran = subprocess.run(
                self._command,
                input=line,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=START_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsError(f"the parsers of {self._engine} cannot be started: {error}") from None
        self._ready(ran.stdout.partition("\n")[0].encode(), ran.stderr)

    async def parsed(self, request: Mapping[str, Any], model_dir: str) -> dict[str, Any] | None:
        """Return a parsed answer; None if the parser failed, which is logged.

        Raises:
            SettingsError: the process cannot start.
        """
        async with self._request_lock:
            process = await self._started(model_dir)
            number = next(self._numbers)
            try:
                async with asyncio.timeout(PARSE_S):
                    answer = await _exchange(process, number, request)
            except (TimeoutError, OSError, ValueError, EOFError) as error:
                _log.warning("session.parser_failed engine=%s error=%r", self._engine, error)
                await self._end()
                return None
            if failed := answer.get("failed"):  # the process stays usable after a parser error
                _log.warning("session.parser_failed engine=%s error=%s", self._engine, failed)
                return None
            return answer

    async def close(self) -> None:
        """End the process. Idempotent."""
        async with self._request_lock:
            await self._end()

    async def _started(self, model_dir: str) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, limit=MAX_LINE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        ready = False
        try:
            async with asyncio.timeout(START_S):
                line = await _request_line(process, {**self._names, "model_dir": model_dir})
            self._ready(line, "")
            ready = True
        except TimeoutError:
            raise SettingsError(
                f"the parsers of {self._engine} were not ready within {START_S:g} s"
            ) from None
        finally:
            if not ready:
                await self._end()
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _ready(self, line: bytes, log: str) -> None:
        try:
            answer = json.loads(line)
        except ValueError:
            end = f": {log.strip()[-300:]}" if log.strip() else ""
            raise SettingsError(
                f"the parsers of {self._engine} cannot be started by {' '.join(self._command)}{end}"
            ) from None
        if refused := answer.get("refused"):
            raise SettingsError(f"setting environment.options: {refused}")


async def _exchange(
    process: asyncio.subprocess.Process, number: int, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the reply to one request; replies to requests of cancelled callers are skipped."""
    line = await _request_line(process, {**request, "number": number})
    while (reply := await _loaded(line))["number"] != number:
        line = await _line(process)
    return reply


async def _loaded(line: bytes) -> dict[str, Any]:
    return await off_loop(len(line), lambda: dict(json.loads(line)))


async def _request_line(process: asyncio.subprocess.Process, request: Mapping[str, Any]) -> bytes:
    if process.stdin is None:
        raise EOFError("no pipe")
    process.stdin.write(await off_loop(size_of(request), lambda: json.dumps(request).encode() + b"\n"))
    await process.stdin.drain()
    return await _line(process)


async def _line(process: asyncio.subprocess.Process) -> bytes:
    line = await process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise EOFError("the parsers' process has ended")
    return line
