"""Runs a program of the environment `command` in a sandbox that can reach only the model's endpoint."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from yarl import URL

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.programs.outcome import Outcome, no_outcome, variables_of, written_outcome
from rollout.programs.program import MAX_LINE, MAX_OUTPUT, ProgramKilled
from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand, SandboxDied, SandboxFull, Start
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.registry import check_endpoint, make_provider

TASK, OUTCOME = "task.json", "outcome.json"
OUTPUT = 16 << 20
"""Output limit of a program, bytes."""


class SandboxedProgram:
    """Runner of a command that starts a new sandbox for each sample."""

    def __init__(
        self,
        config: EnvironmentConfig,
        command: tuple[str, ...],
        directory: str,
        variables: Mapping[str, str],
    ) -> None:
        """Args: directory: module directory of the program, readable in the sandbox; may be empty.

        Raises:
            SettingsError: the sandbox is unknown.
        """
        check_endpoint(config)
        self._command, self._config = command, config
        path = str(Path(directory).absolute()) if directory else ""
        self._variables = {**({"PYTHONPATH": path} if path else {}), **variables}
        sandbox = replace(config.sandbox, read_only=(*config.sandbox.read_only, *filter(None, (path,))))
        self._pool = SandboxPool(make_provider(sandbox), sandbox.starts)

    async def outcome(self, url: str, key: str, task: Mapping[str, Any]) -> Outcome:
        """Run the program for a sample; return the outcome that it wrote, or None.

        Args:
            url: base URL of the sample's session on this machine.
            key: API key of the session.

        Raises:
            ProgramKilled: a signal ended the program, or its sandbox died; the next attempt replays the
                record.
            RuntimeError: the program failed; the message quotes its output.
            ValueError: the outcome is invalid.
        """
        start = Start(self._config.episode_s, str(URL(url).origin()), image=self.image_of(task))
        try:
            async with self._pool.leased(start) as sandbox:
                return await self._run(sandbox, url, key, task)
        except SandboxDied as error:
            raise ProgramKilled(f"the sandbox died: {error}") from None

    def image_of(self, task: Mapping[str, Any]) -> str:
        """Return the image that a task needs; empty: none."""
        return ""

    async def close(self) -> None:
        """Close connections to a sandbox service."""
        await self._pool.close()

    async def _run(self, sandbox: Sandbox, url: str, key: str, task: Mapping[str, Any]) -> Outcome:
        await sandbox.write(TASK, json.dumps(task).encode())
        order = SandboxCommand(
            self._command,
            self._config.episode_s,
            OUTPUT,
            {**variables_of(url, key, TASK, OUTCOME), **self._variables},
        )
        _check(self._command[0], await sandbox.exec(order))
        try:
            return written_outcome(await sandbox.read(OUTCOME, MAX_LINE))
        except SandboxFull as error:
            raise no_outcome(error) from None


def _check(name: str, executed: Executed) -> None:
    """Raise the error of a program that was ended or failed."""
    output = executed.output[-MAX_OUTPUT:].decode(errors="replace").strip()
    if executed.ended:
        raise RuntimeError(f"{name} exceeded the sandbox's limit of {executed.ended}: {output}")
    if executed.status:
        error = ProgramKilled if executed.status < 0 else RuntimeError
        raise error(f"{name} ended with status {executed.status}: {output}")


def check_options(processes: int, user: str) -> None:
    """Check that no option is set that sandboxes do not support.

    Raises:
        SettingsError: an option is set; the message names it.
    """
    for name, value in (("processes", processes), ("user", user)):
        if value:
            raise SettingsError(
                f"setting environment.options.{name}: {value!r}, but in a sandbox a program serves one "
                "sample, as a user of the sandbox; remove the setting, or environment.sandbox"
            )
