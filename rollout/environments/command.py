"""Runs a program for each sample; it talks to the model by the URL in its environment.

The program finds OPENAI_BASE_URL and OPENAI_API_KEY, the same for ANTHROPIC, and two files in its working
directory, which is removed after it: what TETHER_TASK names has the task (text, messages, metadata), and into
the one that TETHER_OUTCOME names it may write {"reward": NUMBER}. Without an outcome verifiers score the last
answer. A program that ends with another status than 0 has failed, which is no reward. Its process group ends
with it.
"""

import asyncio
import json
import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import SettingsError
from rollout.sessions.environment import SessionEnvironment, SessionOptions, Task

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the rollout worker that the program gets; no others, which may have credentials."""
MAX_OUTPUT = 300
"""Bytes that are kept of what a failed program wrote, the last ones."""
MAX_OUTCOME = 2**20
"""Bytes of an outcome."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `command`."""

    command: tuple[str, ...] = ()
    """The program and its arguments, such as ["python", "-m", "my_agent"]; no shell."""
    directory: str = ""
    """Directory that is searched for Python modules (PYTHONPATH). Empty: that of the rollout worker."""
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables of the program."""


class Command(SessionEnvironment):
    """Runs a program once for each sample."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if not options.command:
            raise SettingsError(
                'setting environment.options.command is empty: write it as ["python", "-m", "my_agent"]'
            )
        self._options = options

    async def act(self, task: Task) -> float | None:
        with tempfile.TemporaryDirectory(prefix="tether-command-", ignore_cleanup_errors=True) as folder:
            outcome = Path(folder) / "outcome.json"
            await self._run(task, Path(folder), outcome)
            return _reward(outcome)

    async def _run(self, task: Task, folder: Path, outcome: Path) -> None:
        given = folder / "task.json"
        given.write_text(json.dumps(task.as_json()))
        with (folder / "output").open("w+b") as output:
            process = await self._launched(task, folder, given, outcome, output.fileno())
            try:
                status = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it and what it started
                await process.wait()
            if status:
                output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT))
                said = output.read().decode(errors="replace").strip()
                raise RuntimeError(f"{self._options.command[0]} ended with status {status}: {said}")

    async def _launched(
        self, task: Task, folder: Path, given: Path, outcome: Path, output: int
    ) -> asyncio.subprocess.Process:
        variables = {
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            "PYTHONPATH": self._options.directory or os.getcwd(),
            **self._options.variables,
            "OPENAI_BASE_URL": task.url,
            "OPENAI_API_KEY": task.key,
            "ANTHROPIC_BASE_URL": task.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": task.key,
            "TETHER_TASK": str(given),
            "TETHER_OUTCOME": str(outcome),
        }
        try:
            return await asyncio.create_subprocess_exec(
                *self._options.command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=folder, env=variables, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SettingsError(
                f"setting environment.options.command: {self._options.command[0]} cannot be started: "
                f"{error.strerror}"
            ) from None


def _reward(outcome: Path) -> float | None:
    """Return the reward that a program wrote, None if it wrote none.

    Raises:
        ValueError: the outcome is malformed.
    """
    try:
        with outcome.open("rb") as file:
            found = json.loads(file.read(MAX_OUTCOME))
        reward = found["reward"]
        return None if reward is None else float(reward)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f'the outcome is not {{"reward": NUMBER}}: {error!r}'[:300]) from None


make = Command
