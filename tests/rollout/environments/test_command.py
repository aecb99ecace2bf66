"""Commands: a program finds the URL in its environment, and its calls are the sample."""

import asyncio
import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from protocol.codec import decode_payload
from protocol.errors import EpisodeError, SettingsError
from protocol.messages import Call
from protocol.rollout_view import decode_rollout
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.environments.registry import make_environment
from rollout.prompts.base import Prompt
from services.run_record.call_audit import check_group
from tests.rollout.environments.agents import ASKS, SERVES
from tests.rollout.environments.groups import generated
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.durable import Worker
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

TURNS = 4

REWARDS = (
    ASKS
    + """
assert set(os.environ) >= {"OPENAI_API_KEY"} and "SECRET" not in os.environ, sorted(os.environ)
outcome = {"reward": float(task["metadata"]["answer"]) / 8}
pathlib.Path(os.environ["TETHER_OUTCOME"]).write_text(json.dumps(outcome))
"""
)


def config(program: str, **limits: float) -> EnvironmentConfig:
    options = {"command": [sys.executable, "-c", program]}
    return EnvironmentConfig("command", options, attempts=1, **limits)  # type: ignore[arg-type]


async def test_the_calls_of_a_program_are_its_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "credentials of the worker")
    rollout = await generated(tmp_path, config(REWARDS))
    assert rollout.branches is None
    view = decode_rollout(rollout)
    assert [row.environment_reward for row in view.rows] == [0.5, 0.5]
    for row in view.rows:
        shown = "".join(renderer("tool use").piece(int(token)) for token in row.tokens)
        assert "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n" in shown
        assert not row.sampled.all()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (ASKS + "\nprint('no idea'); sys.exit(3)", r"ended with status 3: no idea"),
        (ASKS + "\nopen(os.environ['TETHER_OUTCOME'], 'w').write('[]')", "the outcome is not"),
        (ASKS + "\nos.mkfifo(os.environ['TETHER_OUTCOME'])", "the outcome is not .*not a regular file"),
        (
            ASKS + "\nos.symlink('/etc/hostname', os.environ['TETHER_OUTCOME'])",
            "the outcome is not .*OSError",
        ),
        ("pass", "without a call of the model"),
    ],
)
async def test_a_program_that_fails_has_no_reward(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(EpisodeError, match=why):
        await generated(tmp_path, config(program), n=1)


async def test_processes_of_a_program_end_with_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = ASKS + (
        f"\nimport subprocess\nend = os.open({str(pipe)!r}, os.O_WRONLY)"
        "\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10**6)'], pass_fds=[end])"
    )
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(asyncio.to_thread(pipe.read_bytes))  # ends with the last writer
        await generated(tmp_path, config(program), n=1)
    assert reading.result() == b""


async def test_a_program_that_hangs_ends_with_its_time(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="episode_s"):
        await generated(tmp_path, config("import time; time.sleep(10**6)", episode_s=0.2), n=1)


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_program_killed_at_every_call_goes_on_after_it(tmp_path: Path, processes: int) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    for turn in range(TURNS):
        (kills / f"harness-{turn}").touch()
    options = {
        "command": ["python", "-m", "tests.integration.long_program"],
        "variables": {"LONG_EPISODE_KILLS": str(kills), "LONG_EPISODE_TURNS": str(TURNS)},
        "processes": processes,
    }
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        store = CallStore(spool)
        recording = Worker(store, "t", version=5).recording(group=7)
        killed = EnvironmentConfig("command", options, attempts=TURNS + 1)
        rollout = await generated(tmp_path, killed, n=1, recording=recording)
        calls = [
            call for item in store.group_calls([7]) if isinstance(call := decode_payload(item.payload), Call)
        ]
    assert list(kills.iterdir()) == []
    names = [name for turn in range(TURNS) for name in ("", f"turn {turn}")]
    assert [(call.number, call.attempt, call.name) for call in calls] == [
        (number, 0, name) for number, name in enumerate(names)
    ]
    thrown = (tmp_path / "kills.thrown").read_text().split()
    assert [call.result.decode() for call in calls if call.name] == thrown
    assert check_group(rollout, calls) == (sum(len(call.tokens.numpy()) for call in calls), [])


def test_a_command_must_be_given() -> None:
    with pytest.raises(SettingsError, match="command is empty"):
        make_environment(EnvironmentConfig("command"))


async def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = EnvironmentConfig("command", {"command": ["no-such-program"]})
    with pytest.raises(SettingsError, match="no-such-program cannot be started: No such file"):
        await generated(tmp_path, made, n=1)


async def test_one_program_that_stays_serves_every_sample(tmp_path: Path) -> None:
    options = {"command": ["python", "-c", SERVES], "processes": 1}
    rows = decode_rollout(await generated(tmp_path, EnvironmentConfig("command", options), n=4)).rows
    assert [row.environment_reward for row in rows] == [0.5] * 4
    assert not any(row.sampled.all() for row in rows)


def sandboxed(program: str, **limits: float) -> EnvironmentConfig:
    options = {"command": ["python3", "-c", program]}
    return EnvironmentConfig("command", options, attempts=1, sandbox=SandboxConfig("bubblewrap"), **limits)  # type: ignore[arg-type]


async def test_a_program_in_a_sandbox_reaches_the_model_and_writes_its_reward(tmp_path: Path) -> None:
    confined = REWARDS + "\nassert os.getcwd() == '/sandbox' and not pathlib.Path('/home').exists()"
    rollout = await generated(tmp_path, sandboxed(confined))
    assert [row.environment_reward for row in decode_rollout(rollout).rows] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (ASKS + "\nprint('no idea'); sys.exit(3)", r"ended with status 3: no idea"),
        (ASKS + "\nos.kill(os.getpid(), 9)", "status -9"),
        (ASKS + "\nos.mkfifo(os.environ['TETHER_OUTCOME'])", "the outcome is not .*not a regular file"),
        ("bytes(4 << 30)", "MemoryError"),
    ],
)
async def test_a_program_that_fails_in_its_sandbox_has_no_reward(
    tmp_path: Path, program: str, why: str
) -> None:
    with pytest.raises(EpisodeError, match=why):
        await generated(tmp_path, sandboxed(program), n=1)


async def test_a_program_in_a_sandbox_ends_with_its_time(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="episode_s"):
        await generated(tmp_path, sandboxed("import time; time.sleep(10**6)", episode_s=2.0), n=1)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("command", {"command": ["true"], "processes": 2}, "processes: 2, but in a sandbox"),
        ("command", {"command": ["true"], "user": "nobody"}, "user: 'nobody', but in a sandbox"),
        ("single_turn", {}, "runs no commands; ones that do are command, harbor, tools"),
    ],
)
def test_a_sandbox_that_cannot_be_is_refused(name: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_environment(EnvironmentConfig(name, options, sandbox=SandboxConfig("bubblewrap")))


@pytest.mark.parametrize("name", ["e2b", "daytona", "modal"])
def test_a_sandbox_elsewhere_needs_an_address_of_the_endpoint_and_its_package(name: str) -> None:
    config = EnvironmentConfig("command", {"command": ["true"]}, sandbox=SandboxConfig(name))
    with pytest.raises(SettingsError, match=rf"advertise: it is empty, and a sandbox of '{name}' does not"):
        make_environment(config)
    if find_spec(name) is None:
        with pytest.raises(SettingsError, match=f"needs the package '{name}'"):
            make_environment(replace(config, advertise="https://far.example"))


def test_a_sandbox_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean 'bubblewrap'"):
        make_environment(EnvironmentConfig("tools", sandbox=SandboxConfig("buble")))


async def test_verifiers_get_the_answer_of_a_program_and_hidden_metadata(tmp_path: Path) -> None:
    told = REWARDS.split("outcome = ")[0] + (
        "\nassert task['metadata'] == {'answer': '4'}, task"
        "\nwrote = {'reward': None, 'answer': 'x = 1'}"
        "\npathlib.Path(os.environ['TETHER_OUTCOME']).write_text(json.dumps(wrote))"
    )
    prompt = Prompt("2+2=", metadata={"answer": "4", "hidden_tests": [1]}, index=7)
    rollout = await generated(tmp_path, config(told), prompt, n=1)
    [row] = decode_rollout(rollout).rows
    assert row.environment_reward is None
    assert rollout.responses == ("x = 1",)


@pytest.mark.parametrize("answer", [3, "\ud800"])
async def test_an_answer_that_is_no_text_is_no_outcome(tmp_path: Path, answer: object) -> None:
    wrote = json.dumps({"reward": None, "answer": answer})
    wrong = f"{ASKS}\nopen(os.environ['TETHER_OUTCOME'], 'w').write({wrote!r})"
    with pytest.raises(EpisodeError, match=r"the (outcome's answer is not a|response is not valid) text"):
        await generated(tmp_path, config(wrong), n=1)
