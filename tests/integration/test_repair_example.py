"""The example deploy/examples/repair: its tasks can be solved, its hidden tests decide, its agents run."""

import ast
import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.rollout_view import decode_rollout
from reward.verifiers import python_tests
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.engines.base import Completion, Request
from rollout.prompts.base import Prompt
from services.tools.check import check_configuration
from tests.integration.loop import ROOT
from tests.rollout.environments.groups import Serving, generated, generating
from tests.rollout.sessions.chats import renderer

EXAMPLE = ROOT / "deploy/examples/repair"


def make(folder: Path, tasks: int = 3) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, str(EXAMPLE / "make_tasks.py"), "--tasks", str(tasks), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {
        path.stem: list(map(json.loads, path.read_text().splitlines())) for path in folder.glob("*.jsonl")
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return make(tmp_path_factory.mktemp("tasks"))


def test_the_same_seed_makes_the_same_tasks(tasks: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    assert make(tmp_path) == tasks
    assert set(tasks) == {"number", "choice", "read", "line", "one", "many"}


def test_a_task_is_a_program_with_one_wrong_line_that_its_hidden_tests_see(
    tasks: dict[str, list[dict[str, Any]]],
) -> None:
    options = python_tests.Options(key="hidden_tests")
    for rung, rows in tasks.items():
        for row in rows:
            wrong = row["files"]["solution.py"]
            ast.parse(wrong)
            lines = [line.strip() for line in wrong.splitlines()]
            numbers = {"number": len(lines), "choice": 2}.get(rung, 0)
            known = list(map(str, range(1, numbers + 1))) if numbers else lines
            assert row["hidden_line"] in known
            assert len(row["hidden_tests"]) == 12
            assert rung == row["rung"]
            if rung == "line":
                *solved, last = row["dialogue"]
                assert [message["role"] for message in solved] == ["user", "assistant"] * 3
                assert row["hidden_line"] in last["content"].splitlines()
                assert row["prompt"].endswith(last["content"])
                assert "```" not in str(row["dialogue"])
    row = tasks["one"][0]
    assert python_tests.score("", row["files"]["solution.py"], row, options) == 0.0


def test_the_judge_wants_the_hidden_line_last(
    tasks: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    judge = importlib.import_module("judge")
    for rung in ("number", "choice", "read", "line"):
        row = tasks[rung][0]
        answers = (f"so\n {row['hidden_line']}\n", f"{row['hidden_line']}\nno", "")
        assert [judge.score(response=answer, metadata=row) for answer in answers] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("config", "rung"), [("config", "line"), ("ladder", "number"), ("ladder", "choice")])
def test_a_configuration_passes_the_check(config: str, rung: str, tmp_path: Path) -> None:
    make(tmp_path / "tasks")
    given = [f"run.dir={tmp_path / 'run'}", f"prompts.path={tmp_path / 'tasks' / rung}.jsonl"]
    assert check_configuration(str(EXAMPLE / f"{config}.toml"), given).problems == []


async def test_an_agent_that_says_nothing_of_use_hands_over_the_file_as_it_was(
    tasks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    row = dict(tasks["one"][0])
    options = {
        "command": ["python3", "-m", "plain_agent"],
        "directory": str(EXAMPLE / "agent"),
        "variables": {"REPAIR_TURNS": "1"},
    }
    config = EnvironmentConfig("command", options, attempts=1, sandbox=SandboxConfig("bubblewrap"))
    row.pop("prompt")
    rollout = await generated(tmp_path, config, Prompt("Repair.", metadata=row, index=7), n=1)
    [sample] = decode_rollout(rollout).rows
    assert sample.environment_reward is None
    assert rollout.responses == (row["files"]["solution.py"],)


class Reading(Serving):
    """The scripted engine, whose turns are a command for the line that is asked for, and then its output."""

    async def generate(self, request: Request) -> Completion:
        text = renderer("tool use")
        last = text.marked(request.prompt).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        asked = re.fullmatch(r"Print line (\d+) of solution\.py\.", last)
        said = f"sed -n {asked[1]}p solution.py" if asked else last
        tokens = (*text.encode(said), request.sampling.stop_token_ids[0])
        return Completion(tokens, (-1.0,) * len(tokens), ((len(tokens), self.served.version),), "stop")


async def test_a_reader_says_the_line_that_only_its_sandbox_has(
    tasks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    row = dict(tasks["read"][0])
    prompt = Prompt(row.pop("prompt"), metadata=row, index=7)
    assert row["hidden_line"] not in prompt.text
    options = {"command": ["python3", "-m", "reader"], "directory": str(EXAMPLE / "agent")}
    config = EnvironmentConfig("command", options, attempts=1, sandbox=SandboxConfig("bubblewrap"))
    async with generating(tmp_path, config, Reading, tokens=80, room=2048) as generate:
        rollout = await generate(prompt, 1)
    assert rollout.responses == (row["hidden_line"],)


class Numbering(Serving):
    """The scripted engine; the log-probability of a token is its number, among all tokens of the group."""

    count = 0

    async def generate(self, request: Request) -> Completion:
        made = await super().generate(request)
        first = type(self).count + 1
        type(self).count += len(made.tokens)
        return replace(made, logprobs=tuple(-float(first + i) for i in range(len(made.tokens))))


async def test_each_token_of_helpers_and_shortened_histories_is_trained_once(
    tasks: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    row = dict(tasks["line"][0])
    row.pop("prompt")
    variables = {"REPAIR_TURNS": "4", "REPAIR_HELPER_TURNS": "2", "REPAIR_HISTORY": "150"}
    options = {
        "command": ["python3", "-m", "long_agent"],
        "directory": str(EXAMPLE / "agent"),
        "variables": variables,
    }
    config = EnvironmentConfig("command", options, attempts=1, sandbox=SandboxConfig("bubblewrap"))
    Numbering.count = 0
    async with generating(tmp_path, config, Numbering) as generate:
        rollout = await generate(Prompt("Repair.", metadata=row, index=7), 2)
    rows = decode_rollout(rollout).rows
    trained = [-logprob for row in rows for logprob in row.logprobs[row.sampled].tolist()]
    assert sorted(trained) == list(range(1, Numbering.count + 1))
    for sample in (0, 1):
        assert sum(row.sample == sample for row in rows) >= 4  # helper, agent, and after each summary
    assert sum(len(row.context) for row in rows) > 0  # which no row has again
