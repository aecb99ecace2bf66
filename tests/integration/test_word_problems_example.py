"""The word problems of deploy/examples: right solutions, sets apart, and configurations that fit them."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from services.tools.check import check_configuration
from tests.data_sets import write_model
from tests.integration.loop import ROOT

EXAMPLE = ROOT / "deploy/examples/word_problems"
SETS = ("train", "new_numbers", "new_stories")
LINE = re.compile(r"[\d +*/-]+")


def make(directory: Path) -> dict[str, list[dict[str, str]]]:
    subprocess.run([sys.executable, EXAMPLE / "make_problems.py", directory], check=True)
    return {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in SETS
    }


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    return make(tmp_path_factory.mktemp("problems"))


@pytest.mark.parametrize("name", SETS)
def test_each_line_of_a_solution_is_right_and_leads_to_the_answer(
    name: str, problems: dict[str, list[dict[str, str]]]
) -> None:
    for row in problems[name]:
        *lines, last = row["solution"].splitlines()
        for line in lines:
            work, result = line.split(" = ")
            assert LINE.fullmatch(work)
            assert eval(work) == int(result)
        assert lines[-1].endswith(f" = {row['answer']}")
        assert last == f"#### {row['answer']}"


def test_no_held_out_problem_is_trained_on(problems: dict[str, list[dict[str, str]]]) -> None:
    questions = [row["question"] for name in SETS for row in problems[name]]
    assert len(set(questions)) == len(questions) == 8_600


def test_a_fifth_of_the_sequences_of_events_is_never_trained_on() -> None:
    trained, held_out = runpy.run_path(str(EXAMPLE / "make_problems.py"))["stories"]()
    assert not set(trained) & set(held_out)
    assert (len(trained), len(held_out)) == (314, 78)


def test_problems_are_the_same_each_time(problems: dict[str, list[dict[str, str]]], tmp_path: Path) -> None:
    assert make(tmp_path) == problems


@pytest.mark.parametrize("config", ["warm_up.toml", "config.toml"])
def test_a_configuration_fits_its_model_and_its_problems(config: str, tmp_path: Path) -> None:
    make(tmp_path / "problems")
    model = write_model(tmp_path / "model")
    sets = ", ".join(f'{{ name = "{name}", path = "{tmp_path}/problems/{name}.jsonl" }}' for name in SETS[1:])
    found = check_configuration(
        str(EXAMPLE / config),
        [
            f"model.path={model}",
            f"prompts.path={tmp_path}/problems/train.jsonl",
            f"eval.sets=[{sets}]",
            f"run.dir={tmp_path / 'run'}",
        ],
    )
    assert found.problems == []
