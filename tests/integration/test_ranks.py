"""A run whose trainer has two ranks, started by torchrun as `tether up` does it, and the replay of one of its steps."""

import json
from pathlib import Path

import pytest

from services.observability.steps import read_steps
from tests.integration.command import audit, processes_of, tether
from tests.integration.loop import ROOT

LAYOUTS = [
    "tensor_model_parallel_size",
    pytest.param("pipeline_model_parallel_size", marks=pytest.mark.slow),
    pytest.param("data_parallel_size", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_make_all_steps(tmp_path: Path, layout: str) -> None:
    overrides = (f"parallel.{layout}=2", "engine.name=hf", "eval.at_end=false", "trainer.checkpoint_every=2", "services.restarts=0")
    words = [word for override in overrides for word in ("--set", override)]
    result = tether("up", str(ROOT / "deploy/configs/demo.toml"), "--steps", "4", "--run-dir", str(tmp_path), *words, seconds=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert audit(tmp_path)["violations"] == []
    assert (tmp_path / "exports/step_00000004/model.safetensors").is_file()
    replay = tether("replay", str(tmp_path), "--step", "3", "--train", "--json", seconds=200)
    assert replay.returncode == 0, replay.stdout + replay.stderr
    facts = json.loads(replay.stdout)
    assert (facts["equal"], facts["train"]["from_version"], facts["train"]["weights_equal"]) == (True, 2, True)
    assert processes_of(tmp_path) == []
