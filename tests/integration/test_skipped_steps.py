"""A run whose steps are all skipped ends with the cause, and says so wherever one looks."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import audit, processes_of, tether, tether_here
from tests.integration.loop import ROOT
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

CONFIG = """
[bound]
groups_per_step = 4
[prompts]
path = "{prompts}"
[sampling]
samples_per_prompt = 2
max_tokens = 4
[engine]
name = "scripted"
max_model_len = 64
[trainer]
backend = "reference"
max_skipped_steps = 2
[monitor]
enabled = false
"""


@slow_unless_changed("services/trainer/", "services/launcher/")
def test_a_run_of_skipped_steps_is_halted_and_names_the_cause(tmp_path: Path) -> None:
    """The scripted engine needs no weights; those that the trainer has are not numbers."""
    scratch = ScratchConfig(vocabulary="0123456789= ", hidden_size=32)
    weights = build_scratch(scratch, tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    config, run_dir = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(
        CONFIG.format(prompts=ROOT / "deploy/examples/max3/prompts.jsonl")
        + f'[model]\npath = "{tmp_path}/model"\n'
    )
    up = tether("up", str(config), "--run-dir", str(run_dir), "--steps", "20")
    assert up.returncode == 1, up.stdout + up.stderr
    last = up.stderr.strip().splitlines()[-1]
    assert "the run halted: 2 steps in a row were skipped" in last
    assert "because the gradient's norm is nan" in last
    assert "algorithm.advantage_eps" in last
    assert "SKIPPED, no weight changed: the gradient's norm is nan" in up.stdout
    assert [step["skipped"] != "" for step in read_steps(run_dir / "metrics.jsonl")] == [True, True]
    assert "step.skipped step=0" in (run_dir / "logs/trainer.log").read_text()
    status = json.loads(tether_here("status", run_dir, "--json").stdout)
    assert status["run_state"].startswith("halted: 2 steps in a row were skipped")
    assert (status["skipped_steps"], status["skipped_groups"], status["version"]) == (2, 8, 2)
    assert audit(run_dir)["violations"] == []
    assert processes_of(run_dir) == []
