"""Runs a program on Harbor tasks in sandboxes, and scores it with each task's tests.

A task is a directory with `task.toml`, `instruction.md` and `tests/test.sh`. The program starts as in
`command`. After its end, `tests/` is copied to /tests, `bash /tests/test.sh` runs, and the reward is read
from /logs/verifier/reward.txt or reward.json. This module also writes the prompts:

    python -m rollout.environments.third_party.harbor DIRECTORY-OF-TASKS PROMPTS.jsonl
"""

import json
import math
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol.errors import SettingsError, error_text
from protocol.host.atomic_file import check_absent, write_atomically
from rollout.command_line import errors_as_exit_code
from rollout.config import EnvironmentConfig
from rollout.environments import command
from rollout.programs.outcome import Outcome
from rollout.programs.program import MAX_OUTPUT
from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand, SandboxFull
from rollout.sandboxes.program import OUTPUT, SandboxedProgram
from rollout.sandboxes.registry import PROCESS

TESTS, LOGS, VERIFIER = "/tests", "/logs", "/logs/verifier"
PLACES = (TESTS, LOGS)
"""Sandbox directories that tests may write."""
TEST_FILE = "tests/test.sh"
FIELD = "harbor"
"""Prompt field with the task's directory."""
NO_NETWORK = "no-network"
CLEARED = f"""
set -e
chmod -R u+rwX {TESTS} {LOGS} || true
rm -rf {VERIFIER}
find {TESTS} -mindepth 1 -delete
[ -z "$(ls -A {TESTS})" ]
mkdir {VERIFIER}
"""
"""Deletes the program's files from the test and verifier directories; fails if a file remains."""
NONE: Mapping[str, str] = MappingProxyType({})
TEST_S = 600.0
"""Default timeout of a task's tests, seconds."""
MAX_REWARD = 1 << 16
"""Maximum size of a reward file, bytes."""
UNKNOWN = ("steps", "artifacts")
UNKNOWN_HERE = ("gpus", "tpu", "mcp_servers", "skills_dir", "healthcheck", "env", "workdir")
"""Unsupported settings of a task and of its environment."""


@dataclass(frozen=True, slots=True)
class Options(command.Options):
    """Options of `harbor`."""

    offline: bool = False
    """Whether to run tasks that ask for internet access without it, because their tests do not need it."""


@dataclass(frozen=True)
class HarborTask:
    """Parsed task directory."""

    path: Path
    image: str
    """Image named by the task; may be empty."""
    test_s: float
    variables: dict[str, str]
    """Environment variables of the tests."""


class HarborProgram(SandboxedProgram):
    """Program followed by the tests of its task, in one sandbox."""

    offline = False

    def image_of(self, task: Mapping[str, Any]) -> str:
        return self._read(task).image

    async def _run(self, sandbox: Sandbox, url: str, key: str, task: Mapping[str, Any]) -> Outcome:
        shown = {name: value for name, value in task["metadata"].items() if name != FIELD}
        await super()._run(sandbox, url, key, {**task, "metadata": shown})
        return await run_tests(sandbox, self._read(task))

    def _read(self, task: Mapping[str, Any]) -> HarborTask:
        if not isinstance(folder := task["metadata"].get(FIELD), str):
            raise SettingsError(
                f"a prompt has no field {FIELD!r}: write prompts by "
                "python -m rollout.environments.third_party.harbor"
            )
        return read_task(Path(folder), offline=self.offline)


class Harbor(command.Command):
    """Environment `harbor`."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._offline = options.offline

    def apply_config(self, config: EnvironmentConfig) -> None:
        """Set up the sandbox.

        Raises:
            SettingsError: the sandbox is `process`, is unknown, or does not support a configured option.
        """
        if config.sandbox.name == PROCESS:
            raise SettingsError(
                "setting environment.sandbox.name: 'process', but the environment harbor needs a sandbox, "
                "such as 'container'"
            )
        directories = tuple(dict.fromkeys((*config.sandbox.directories, *PLACES)))
        super().apply_config(replace(config, sandbox=replace(config.sandbox, directories=directories)))

    def sandboxed(self, config: EnvironmentConfig) -> SandboxedProgram:
        program = HarborProgram(config, *self.program)
        program.offline = self._offline
        return program


def read_task(path: Path, *, offline: bool) -> HarborTask:
    """Return the task in a directory.

    Args:
        path: task directory.
        offline: whether to accept tasks that ask for internet access.

    Raises:
        SettingsError: the directory is not a task, or has an unsupported setting; the message names it.
    """
    try:
        settings = tomllib.loads((path / "task.toml").read_text("utf-8"))
        environment, verifier = dict(settings.get("environment", {})), dict(settings.get("verifier", {}))
        test_s = float(verifier.get("timeout_sec", TEST_S))
        variables = {name: str(value) for name, value in dict(verifier.get("env", {})).items()}
    except (OSError, TypeError, ValueError) as error:
        raise SettingsError(f"Harbor task {path}: task.toml: {error_text(error)}") from None
    wrong = [name for name in UNKNOWN if settings.get(name)]
    wrong += [f"environment.{name}" for name in UNKNOWN_HERE if environment.get(name)]
    wrong += [name for name in ("steps", "environment/docker-compose.yaml") if (path / name).exists()]
    if wrong or not (path / TEST_FILE).is_file():
        raise SettingsError(f"Harbor task {path}: " + (
            f"{wrong[0]} is not known here" if wrong else f"there is no {TEST_FILE}"
        ))  # fmt: skip
    is_public = environment.get("allow_internet", True)
    mode = environment.get("network_mode", "public" if is_public else NO_NETWORK)
    if mode != NO_NETWORK and not offline:
        raise SettingsError(
            f"Harbor task {path} asks for the network {mode!r}, which a sandbox does not have; if its tests "
            "do not need it, set environment.options.offline to true"
        )
    return HarborTask(path, environment.get("docker_image") or "", test_s, variables)


async def run_tests(sandbox: Sandbox, task: HarborTask) -> float:
    """Run a task's tests in the sandbox after the program has ended; return the reward.

    Raises:
        RuntimeError: the tests wrote no reward or timed out, or files of the program cannot be deleted.
        SandboxDied: the sandbox has ended.
    """
    cleared = await _run_command(sandbox, ("sh", "-c", CLEARED))
    if cleared.ended or cleared.status:
        raise RuntimeError(f"files in {TESTS} and {VERIFIER} cannot be removed: {_output_end(cleared)}")
    tests = task.path / "tests"
    for file in sorted(tests.rglob("*")):
        if file.is_file():
            await sandbox.write(f"{TESTS}/{file.relative_to(tests)}", file.read_bytes())
    ended = await _run_command(sandbox, ("bash", f"{TESTS}/test.sh"), task.test_s, task.variables)
    for name in ("reward.json", "reward.txt"):
        with suppress(SandboxFull):
            if (data := await sandbox.read(f"{VERIFIER}/{name}", MAX_REWARD)) is not None:
                return _reward(name, data)
    limit = f", after the limit of {ended.ended}" if ended.ended else ""
    raise RuntimeError(f"the tests of {task.path.name} wrote no reward{limit}: {_output_end(ended)}")


async def _run_command(
    sandbox: Sandbox, words: tuple[str, ...], wall_s: float = TEST_S, variables: Mapping[str, str] = NONE
) -> Executed:
    return await sandbox.exec(SandboxCommand(words, wall_s, OUTPUT, variables))


def _output_end(ended: Executed) -> str:
    return ended.output[-MAX_OUTPUT:].decode(errors="replace").strip()


def _reward(name: str, data: bytes) -> float:
    """Return the reward in a file: a number, or an object with `reward` or with a single number."""
    try:
        value = json.loads(data) if name.endswith(".json") else data
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
        reward = float(value)
    except (ValueError, TypeError, KeyError, RecursionError):
        reward = math.nan
    if not math.isfinite(reward):
        raise RuntimeError(f"the tests wrote no number to {name}: {data[:100]!r}")
    return reward


def write_prompts(tasks: Path, prompts: Path) -> int:
    """Write a prompt for each task in a directory; return their number.

    Raises:
        SettingsError: the file exists, there is no task, or a task is invalid.
    """
    check_absent(prompts)
    folders = sorted(file.parent for file in tasks.glob("*/task.toml"))
    if not folders:
        raise SettingsError(f"there is no task in {tasks}: a task is a directory in it with task.toml")
    rows = [
        {"prompt": _instruction(folder), FIELD: str(folder.absolute())}
        for folder in folders
        if read_task(folder, offline=True)
    ]
    write_atomically(prompts, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    return len(rows)


def _instruction(folder: Path) -> str:
    try:
        return (folder / "instruction.md").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise SettingsError(f"Harbor task {folder}: instruction.md: {error_text(error)}") from None


@errors_as_exit_code
def main(arguments: list[str]) -> int:
    """Run `python -m rollout.environments.third_party.harbor`; return the exit code."""
    match arguments:
        case [tasks, prompts]:
            print(f"{write_prompts(Path(tasks), Path(prompts))} tasks")
            return 0
    print(__doc__, file=sys.stderr)
    return 2


make = Harbor

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
