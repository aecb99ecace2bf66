"""Tasks of Harbor, by their documented layout, in sandboxes of bubblewrap."""

import json
import sys
from pathlib import Path
from typing import cast

import pytest

from protocol.errors import EpisodeError, SettingsError
from protocol.rollout_view import decode_rollout
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.environments.registry import make_environment
from rollout.environments.third_party.harbor import main, read_task
from rollout.environments.third_party.harbor import run_tests as reward_of
from rollout.prompts.base import Prompt
from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand
from tests.changes import slow_unless_changed
from tests.rollout.environments.groups import generated

SETTINGS = """
schema_version = "1.4"
[environment]
{environment}
[verifier]
timeout_sec = {seconds}
env = {{ WANTED = "done" }}
"""
OFFLINE = "allow_internet = false"
AGENT = """
import json, os, urllib.request
task = json.load(open(os.environ["TETHER_TASK"]))
body = {"model": "policy", "messages": task["messages"]}
ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                             {"Content-Type": "application/json"})
urllib.request.urlopen(ask).read()
os.makedirs("/logs/verifier")
open("/logs/verifier/reward.txt", "w").write("100")
open("/tests/helper.sh", "w").write("exit 1")
open("result", "w").write("done" if task["metadata"] == {} else "seen")
"""
FORGES = (
    AGENT.split("os.makedirs")[0]
    + """
import subprocess
subprocess.run(["sh", "-c", '''
mkdir /logs/verifier; echo 1 > /logs/verifier/$0; chmod 444 /logs/verifier/$0; chmod 555 /logs/verifier
mkdir /tests/more; echo 'points=1' > /tests/more/helper.sh; chmod 444 /tests/more/*; chmod 0 /tests/more
''', "NAME"], check=True)
"""
)
TEST = '. /tests/more/helper.sh; echo "{\\"reward\\": $points}" > /logs/verifier/reward.json; rm result'
HELPER = '[ -e /tests/helper.sh ] && exit 1; [ "$(cat result)" = "$WANTED" ] && points=0.75 || points=0'


def write_task(folder: Path, test: str = TEST, environment: str = OFFLINE, seconds: int = 60) -> None:
    (folder / "tests/more").mkdir(parents=True)
    (folder / "task.toml").write_text(SETTINGS.format(environment=environment, seconds=seconds))
    (folder / "instruction.md").write_text("2+2=")
    (folder / "tests/test.sh").write_text(test)
    (folder / "tests/more/helper.sh").write_text(HELPER)


def harbor(**options: object) -> EnvironmentConfig:
    command = ["python3", "-c", AGENT]
    sandbox = SandboxConfig("bubblewrap", memory_mb=512, disk_mb=8)
    return EnvironmentConfig("harbor", {"command": command, **options}, attempts=1, sandbox=sandbox)


@slow_unless_changed("rollout/sandboxes/", "rollout/environments/third_party/harbor.py")
async def test_the_reward_is_what_the_tests_of_the_task_write(tmp_path: Path) -> None:
    write_task(tmp_path / "task")
    prompt = Prompt("2+2=", metadata={"harbor": str(tmp_path / "task")}, index=7)
    rollout = await generated(tmp_path, harbor(), prompt)
    assert [row.environment_reward for row in decode_rollout(rollout).rows] == [0.75, 0.75]


@slow_unless_changed("rollout/sandboxes/", "rollout/environments/third_party/harbor.py")
@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
async def test_a_program_cannot_write_its_reward(tmp_path: Path, name: str) -> None:
    write_task(tmp_path / "task", "echo 0 > /logs/verifier/reward.txt")
    prompt = Prompt("2+2=", metadata={"harbor": str(tmp_path / "task")}, index=7)
    forging = harbor(command=["python3", "-c", FORGES.replace("NAME", name)])
    [row] = decode_rollout(await generated(tmp_path, forging, prompt, n=1)).rows
    assert row.environment_reward == 0


class FullSandbox:
    """A sandbox in which no file can be removed."""

    async def exec(self, order: SandboxCommand) -> Executed:
        return Executed(b"rm: no", "", 1)


async def test_no_test_runs_where_files_of_the_program_stay(tmp_path: Path) -> None:
    write_task(tmp_path / "task")
    with pytest.raises(RuntimeError, match="cannot be removed: rm: no"):
        await reward_of(cast(Sandbox, FullSandbox()), read_task(tmp_path / "task", offline=False))


class WrittenReward:
    """A sandbox in which tests have written a text as their reward."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    async def exec(self, order: SandboxCommand) -> Executed:
        return Executed(b"", "", 0)

    async def write(self, path: str, data: bytes) -> None:
        pass

    async def read(self, path: str, most: int) -> bytes | None:
        return self._text if path.endswith("reward.txt") else None


@pytest.mark.parametrize(("text", "reward"), [(b"1\n", 1.0), (b".25\n", 0.25), (b" +2.\n", 2.0)])
async def test_a_reward_is_any_number_that_python_reads(tmp_path: Path, text: bytes, reward: float) -> None:
    write_task(tmp_path / "task")
    sandbox = cast(Sandbox, WrittenReward(text))
    assert await reward_of(sandbox, read_task(tmp_path / "task", offline=False)) == reward


@slow_unless_changed("rollout/sandboxes/", "rollout/environments/third_party/harbor.py")
@pytest.mark.parametrize(
    ("test", "environment", "seconds", "why"),
    [
        ("echo no; exit 1", OFFLINE, 60, "tests of task wrote no reward: no"),
        ("sleep 1000", OFFLINE, 1, "wrote no reward, after the limit of time"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', OFFLINE, 60, "no number"),
        (TEST, "", 60, "asks for the network 'public'"),
        (TEST, 'allow_internet = false\ndocker_image = "x"', 60, "needs the image 'x'"),
    ],
)
async def test_a_task_without_a_result_has_no_reward(
    tmp_path: Path, test: str, environment: str, seconds: int, why: str
) -> None:
    write_task(tmp_path / "task", test, environment, seconds)
    prompt = Prompt("2+2=", metadata={"harbor": str(tmp_path / "task")}, index=7)
    with pytest.raises((EpisodeError, SettingsError), match=why):
        await generated(tmp_path, harbor(), prompt, n=1)


def test_prompts_are_written_for_each_task_and_unknown_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name, environment="")
    prompts = tmp_path / "prompts.jsonl"
    assert main([str(tmp_path / "tasks"), str(prompts)]) == 0
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert lines == [{"prompt": "2+2=", "harbor": str(tmp_path / "tasks" / name)} for name in ("a", "b")]
    (tmp_path / "tasks/a/steps").mkdir()
    assert main([str(tmp_path / "tasks"), str(tmp_path / "others.jsonl")]) == 2
    assert capsys.readouterr().err.endswith("tasks/a: steps is not known here\n")
    with pytest.raises(SettingsError, match="No such file"):
        read_task(tmp_path, offline=True)


def test_prompts_of_before_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "tasks/a")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("mine")
    assert main([str(tmp_path / "tasks"), str(prompts)]) == 2
    assert capsys.readouterr().err == f"{prompts} exists; give another file, or delete it\n"
    assert prompts.read_text() == "mine"


@pytest.mark.parametrize("name", ["absent", "tasks/a"])
def test_a_directory_without_tasks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_task(tmp_path / "tasks/a")
    assert main([str(tmp_path / name), str(tmp_path / "prompts.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"there is no task in {tmp_path / name}: ")
    assert not (tmp_path / "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("task.toml", b"[environment", "task.toml: "),
        ("task.toml", b"\xff", "task.toml: 'utf-8' codec"),
        ("task.toml", b'environment = "x"', "task.toml: "),
        (
            "task.toml",
            b'[verifier]\ntimeout_sec = "long"',
            "task.toml: could not convert string to float: 'long'",
        ),
        ("task.toml", b"[verifier]\nenv = 3", "task.toml: "),
        ("instruction.md", b"\xff", "instruction.md: 'utf-8' codec"),
    ],
)
def test_a_file_of_a_task_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, data: bytes, says: str
) -> None:
    write_task(tmp_path / "tasks/a")
    (tmp_path / "tasks/a" / file).write_bytes(data)
    assert main([str(tmp_path / "tasks"), str(tmp_path / "prompts.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"Harbor task {tmp_path / 'tasks/a'}: {says}")
    assert not (tmp_path / "prompts.jsonl").exists()


def test_a_sandbox_and_a_task_are_needed() -> None:
    with pytest.raises(SettingsError, match="harbor needs a sandbox"):
        make_environment(EnvironmentConfig("harbor", {"command": [sys.executable]}))
