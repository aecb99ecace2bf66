"""Runs a program for each sample, or a few that serve one after another; it talks to the model by a URL.

The program finds OPENAI_BASE_URL and OPENAI_API_KEY, the same for ANTHROPIC, and two files in its working
directory, which is removed after it: what TETHER_TASK names has the task (text, messages, metadata), and into
the one that TETHER_OUTCOME names it may write {"reward": NUMBER}. Without an outcome verifiers score the last
answer. A program that ends with another status than 0 has failed, which is no reward; one that a signal ended
is run again on the record. What it started ends with it.

Another `environment.sandbox` than `process` runs it in a sandbox (`rollout/sandboxes/program.py`). With the
option `processes` a program stays: `rollout/programs/standing_programs.py`.
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
"""File in a program's directory that the program may write."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `command`."""

    command: tuple[str, ...] = ()
    """The program and its arguments, such as ["python", "-m", "my_agent"]; no shell. `python` is the rollout
    worker's."""
    directory: str = ""
    """Directory that is searched for Python modules, before those of `run.modules`. Empty: the rollout
    worker's directory."""
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables of the program."""
    processes: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """Processes of the program in one rollout worker that stay, and serve one sample after another. 0: each
    sample has a process, which ends with it."""
    user: str = ""
    """User of this machine that the program runs as; the rollout worker has to be root. Empty: the worker's
    user, whose files the program can read."""


class Command(SessionEnvironment):
    """Runs a program once for each sample, or has programs that stay serve all of them."""

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

    def configured(self, config: EnvironmentConfig) -> None:
        """Learn where the endpoint listens, and where programs run.

        Raises:
            SettingsError: there is no such sandbox, or it lacks a thing that an option asks for.
        """
        super().configured(config)
        if config.sandbox.name != PROCESS:
            check_options(self._options.processes, self._options.user)
            self._sandboxed = self.sandboxed(config)

    def check_program(self) -> None:
        """Check that there is such a program on this host, unless a sandbox has it.

        Raises:
            SettingsError: it names the program.
        """
        if self._sandboxed is None and not self._launch.is_there:
            raise SettingsError(
                f"setting environment.options.command: there is no program {self._options.command[0]!r} in "
                "PATH; install it, or write its whole path"
            )

    @property
    def program(self) -> tuple[tuple[str, ...], str, dict[str, str]]:
        """The command, the directory of its modules, and its variables."""
        return self._options.command, self._options.directory, self._options.variables

    def sandboxed(self, config: EnvironmentConfig) -> SandboxedProgram:
        """Return what runs the program in sandboxes."""
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
    """Run a program for one sample, and return the outcome that it wrote, None if it wrote none."""
    task_file = program.write("task.json", json.dumps(task.as_json()))
    await program.start(variables_of(task.url, task.key, str(task_file), str(program.folder / OUTCOME)))
    await program.ended()
    try:
        return written_outcome(program.read(OUTCOME, MAX_LINE))
    except OSError as error:
        raise no_outcome(error) from None


make = Command
