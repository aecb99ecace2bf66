"""Runs a program per sample, or a few persistent programs; the program calls the model at a URL.

The program gets OPENAI_BASE_URL, OPENAI_API_KEY and the equivalent ANTHROPIC variables. Its working directory
is temporary and contains two files. TETHER_TASK names the file with the task (text, messages, metadata).
TETHER_OUTCOME names the file into which the program may write {"reward": NUMBER}. Without an outcome,
verifiers score the last answer. A program that exits with a status other than 0 fails the sample, without a
reward. A program ended by a signal is run again on the record. Its child processes end with it.

With an `environment.sandbox` other than `process`, the program runs in a sandbox
(`rollout/sandboxes/program.py`). With the option `processes`, programs persist over samples
(`rollout/programs/standing_programs.py`).
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.session import SessionEnvironment, SessionOptions, Task
from rollout.programs.folder import clear_left_folders
from rollout.programs.outcome import Outcome, no_outcome, variables_of, written_outcome
from rollout.programs.owner import find_owner
from rollout.programs.program import MAX_LINE, Launch, Program
from rollout.programs.standing_programs import StandingPrograms
from rollout.sandboxes.program import SandboxedProgram, check_options
from rollout.sandboxes.registry import PROCESS

OUTCOME = "outcome.json"
"""Outcome file in a program's directory."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `command`."""

    command: tuple[str, ...] = ()
    """Program and arguments, such as ["python", "-m", "my_agent"]; no shell is used. `python` is the rollout
    worker's interpreter."""
    directory: str = ""
    """Directory searched for Python modules before `run.modules`. Empty: the rollout worker's working
    directory."""
    variables: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the program."""
    processes: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Number of persistent program processes per rollout worker, each serving one sample after another. 0:
    start one process per sample."""
    user: str = ""
    """User that runs the program; requires a rollout worker running as root. Empty: the worker's user, whose
    files the program can read."""


class Command(SessionEnvironment):
    """Environment that runs a program per sample, or lets persistent programs serve all samples."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if not options.command:
            raise SettingsError(
                'setting environment.options.command is empty: write it as ["python", "-m", "my_agent"]'
            )
        self._options = options
        self._launch = Launch(
            options.command, options.directory, options.variables, owner=find_owner(options.user)
        )
        self._standing = StandingPrograms(self._launch, options.processes) if options.processes else None
        self._cleared = False
        self._sandboxed: SandboxedProgram | None = None

    def apply_config(self, config: EnvironmentConfig) -> None:
        """Store the endpoint's address and set up the sandbox.

        Raises:
            SettingsError: the sandbox is unknown, or does not support a configured option.
        """
        super().apply_config(config)
        if config.sandbox.name != PROCESS:
            check_options(self._options.processes, self._options.user)
            self._sandboxed = self.sandboxed(config)

    def check_program(self) -> None:
        """Check that the program exists on this host, unless it runs in a sandbox.

        Raises:
            SettingsError: the program is not in PATH; the message names it.
        """
        if self._sandboxed is None and not self._launch.is_there:
            raise SettingsError(
                f"setting environment.options.command: there is no program {self._options.command[0]!r} in "
                "PATH; install it, or write its whole path"
            )

    @property
    def program(self) -> tuple[tuple[str, ...], str, dict[str, str]]:
        """(command, module directory, environment variables) of the program."""
        return self._options.command, self._options.directory, self._options.variables

    def sandboxed(self, config: EnvironmentConfig) -> SandboxedProgram:
        """Return a runner of the program in sandboxes."""
        return SandboxedProgram(config, *self.program)

    async def act(self, task: Task) -> Outcome:
        if self._sandboxed is not None:
            return await self._sandboxed.outcome(task.url, task.key, task.as_json())
        if not self._cleared:
            self._cleared = True
            await asyncio.to_thread(clear_left_folders)
        if self._standing is not None:
            return await self._standing.outcome({"url": task.url, "key": task.key, **task.as_json()})
        program = Program(self._launch)
        try:
            return await _served(program, task)
        finally:
            await program.close()

    async def close(self) -> None:
        if self._standing is not None:
            await self._standing.close()
        if self._sandboxed is not None:
            await self._sandboxed.close()
        await super().close()


async def _served(program: Program, task: Task) -> Outcome:
    """Run a program for one sample; return the outcome that it wrote, or None."""
    task_file = program.write("task.json", json.dumps(task.as_json()))
    await program.start(variables_of(task.url, task.key, str(task_file), str(program.folder / OUTCOME)))
    await program.ended()
    try:
        return written_outcome(program.read(OUTCOME, MAX_LINE))
    except OSError as error:
        raise no_outcome(error) from None


make = Command
