"""Tests a run whose trainer trains the engine's draft head in its idle time, is killed, and continues."""

import json
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.run_record.steps import read_steps
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.engine_draft_models import write_head
from tests.integration.command import audit, pids, tether, tether_up, until
from tests.integration.loop import ROOT

STEPS, EVERY, KILLED = 12, 3, 5
TARGET = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
    "vocab_size": 14, "max_position_embeddings": 64,
}  # fmt: skip
"""Sizes of the model of deploy/configs/stragglers.toml."""
HERE = ("tests/integration/test_draft_training.py", "trainer/reference/eagle.py", "trainer/roles/drafts.py")


@slow_unless_changed(*VLLM, *HERE, "services/trainer/train_loop.py")
def test_head_that_is_trained_between_steps_survives_the_trainer(tmp_path: Path) -> None:
    head, run_dir = write_head(TARGET, torch.float32, tmp_path / "head"), tmp_path / "run"
    settings = (
        f"run.steps={STEPS}", f"trainer.checkpoint_every={EVERY}", "trainer.backend=reference",
        "engine.name=vllm", "engine.max_model_len=64", "engine.kv_cache_mb=64", "engine.drafts=model_always",
        f"engine.draft_model={head}", "engine.draft_lr=1e-3", "engine.num_speculative_tokens=2",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    config, output = str(ROOT / "deploy/configs/stragglers.toml"), tmp_path / "up.log"
    with tether_up(config, *words, "--run-dir", str(run_dir), output=output) as up:
        until(lambda: len(read_steps(run_dir / "metrics.jsonl")) >= KILLED, seconds=300, what="a step")
        os.kill(pids(run_dir, "stragglers")["trainer"], signal.SIGKILL)
        assert up.wait(300) == 0, output.read_text()

    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert (audited := audit(run_dir))["code"] == 0, audited
    verified = tether("verify", str(run_dir), "--numerics", "--json")
    numerics = json.loads(verified.stdout)
    assert (verified.returncode, numerics["alarms"], numerics["numerics_exact"]) == (0, [], 0)
    assert "head that engine.draft_lr trained" in numerics["numerics_not_compared"]
    trained = [step for step in steps if step.get("draft_loss") is not None]
    assert trained
    assert all(0 < step["drafts_s"] <= step["wait_s"] for step in trained)

    events = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resume"][-1]
    committed = [e for e in events if e["event"] == "commit" and e["version"] == resumed["version"]]
    assert resumed["version"] >= EVERY
    assert resumed["digest"] in {event["digest"] for event in committed}  # with the head that it had
    saved = load_file(run_dir / f"checkpoints/step_{STEPS:08d}/draft_head/model.safetensors")
    begun = load_file(head / "model.safetensors")
    assert not torch.equal(saved["fc.weight"], begun["fc.weight"])
