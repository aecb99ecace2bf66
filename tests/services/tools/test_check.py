"""Tests the answer of `tether check` as text and as an exit code."""

import json
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from protocol.messages import StepReport
from services.cli import app
from services.run_record.steps import FILE as STEPS
from services.run_record.steps import StepLog
from services.settings.load import FILE, dump_settings, load_settings
from services.tools.check import CheckedRun, check_configuration, render_check
from tests.integration.loop import ROOT

DEMO = str(ROOT / "deploy/configs/demo.toml")


def test_check_configuration_lists_every_setting_that_is_wrong_by_itself() -> None:
    found = check_configuration(
        DEMO, ["optimizer.lr=nan", "optimizer.lr_warmup_steps=-1", "engine.name=vlm", "run.name=../up"]
    )
    assert len(found.problems) == 4
    assert found.summary == []
    assert "optimizer.lr: nan is not between 0 and 1000" in "\n".join(found.problems)


def test_check_configuration_lists_every_unknown_name_and_choice_at_once() -> None:
    found = check_configuration(DEMO, ["run.stps=1", "trainer.dtype=flot32", "bound.staleness_policy=drp"])
    assert found.problems == [
        "setting run.stps is not known; did you mean 'steps'?",
        "setting bound.staleness_policy: 'drp' is not known; did you mean 'drop'?",
        "setting trainer.dtype: 'flot32' is not known; did you mean 'float32'?",
    ]


def test_check_configuration_names_a_ledger_that_does_not_answer() -> None:
    found = check_configuration(DEMO, ["engine.name=hf", 'ledger.url="redis://127.0.0.1:1/0"'])
    (text,) = found.problems
    assert "127.0.0.1:1" in text


def test_check_configuration_finds_that_the_end_has_no_held_out_prompts_to_score(tmp_path: Path) -> None:
    settings = ["engine.name=hf", f'run.dir="{tmp_path}/run"', "prompts.held_out=0"]
    (text,) = check_configuration(DEMO, [*settings, "eval.at_end=true"]).problems
    assert text.startswith("no held-out prompts to score on: set prompts.held_out")
    assert check_configuration(DEMO, [*settings, "eval.at_end=false"]).problems == []


def test_check_configuration_refuses_what_a_resume_may_not_change(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = ["engine.name=hf", f'run.dir="{run_dir}"', "lora.rank=4"]
    dump_settings(load_settings(DEMO, settings), run_dir / FILE)
    assert check_configuration(DEMO, [*settings, "optimizer.lr=1e-4"]).problems == []
    (text,) = check_configuration(DEMO, [*settings, "lora.rank=8"]).problems
    assert text.startswith("setting lora.rank is 4 in the run and 8 now, and cannot change")


def test_check_configuration_says_that_a_run_has_made_the_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = ["engine.name=hf", f'run.dir="{run_dir}"']
    dump_settings(load_settings(DEMO, [*settings, "run.steps=7"]), run_dir / FILE)
    StepLog(run_dir / STEPS).append(StepReport(step=4, version=5, epoch="e", reward_mean=0.0))
    (text,) = check_configuration(DEMO, [*settings, "run.steps=4"]).problems
    assert text == "setting run.steps: 4 is below the 5 steps that the run has made; it was started with 7"
    done, more = (check_configuration(DEMO, [*settings, f"run.steps={steps}"]) for steps in (5, 6))
    assert (done.problems, more.problems) == ([], [])
    assert done.summary[-1] == "done     the run has made all 5 steps: set run.steps higher to train more"
    assert "has made" not in "\n".join(more.summary)


def test_render_check_counts_the_problems() -> None:
    assert render_check(CheckedRun([], ["model m"])) == "OK\nmodel m"
    assert render_check(CheckedRun(["a", "b"], [])) == "2 problems\n- a\n- b"


def test_check_ends_with_2_where_a_run_could_not_start(tmp_path: Path) -> None:
    arguments = ["check", DEMO, "--json", "--set", "engine.name=hf", "--set", f'run.dir="{tmp_path}/run"']
    good = CliRunner().invoke(app, arguments)
    assert (good.exit_code, json.loads(good.stdout)["problems"]) == (0, [])
    bad = CliRunner().invoke(app, [*arguments, "--set", "sampling.top_p=0.5"])
    assert bad.exit_code == 2
    assert "sampling.top_p = 0.5" in json.loads(bad.stdout)["problems"][0]
    assert not (tmp_path / "run").exists()


def test_check_takes_the_options_of_up(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    words = ["--run-dir", str(tmp_path), "--steps", "3", "--rollouts", "2", "--rewards", "2"]
    result = CliRunner().invoke(app, ["check", DEMO, *words])
    assert result.exit_code == 2
    assert "it holds other files (notes.txt) and no run" in result.output
    commands = [get_command(app).commands[name] for name in ("check", "up")]  # type: ignore[attr-defined]
    checked, started = ({option for item in command.params for option in item.opts} for command in commands)
    assert checked - {"--json"} == started
