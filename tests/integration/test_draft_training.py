"""Tests a run whose trainer trains the engine's draft head in its idle time, is killed, and continues."""

import asyncio
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout.engines.base import EngineConfig
from rollout.engines.vllm.engine import VllmEngine
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.engine_draft_models import write_head
from tests.integration.gate import Spot, When
from tests.integration.trainer_place import place

STEPS, EVERY, KILLED = 9, 3, 5
TARGET = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
    "vocab_size": 14, "max_position_embeddings": 64,
}  # fmt: skip
"""Sizes of the model of deploy/configs/stragglers.toml."""


@slow_unless_changed(*VLLM, "tests/integration/test_draft_training.py", "trainer/reference/eagle.py")
async def test_head_that_is_trained_between_steps_survives_the_trainer(tmp_path: Path) -> None:
    head = write_head(TARGET, torch.float32, tmp_path / "head")
    settings = (
        f"run.steps={STEPS}", f"trainer.checkpoint_every={EVERY}", "trainer.backend=reference",
        "engine.name=vllm", "engine.max_model_len=64", "engine.kv_cache_mb=64", "engine.drafts=model_always",
        f"engine.draft_model={head}", "engine.draft_lr=1e-3", "engine.num_speculative_tokens=2",
    )  # fmt: skip
    VllmEngine.preload(EngineConfig(name="vllm"))  # it holds up services that are starting
    run_dir = tmp_path / "run"
    async with asyncio.timeout(800), place(run_dir, *settings) as here:
        await here.kill(await here.held(Spot("commit", When.AFTER), after_step=KILLED))
        last = await here.trainer()
        assert await last.wait() == 0, here.log(1).read_text()

    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert (result := verify(run_dir / "audit.jsonl")).violations == []
    assert result.steps >= STEPS
    trained = [step for step in steps if step.get("draft_loss") is not None]
    assert trained
    assert all(0 < step["drafts_s"] <= step["wait_s"] for step in trained)

    events = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resume"][-1]
    committed = [e for e in events if e["event"] == "commit" and e["version"] == resumed["version"]]
    assert resumed["digest"] in {event["digest"] for event in committed}  # with the head that it had
    saved = load_file(run_dir / f"checkpoints/step_{STEPS:08d}/draft_head/model.safetensors")
    begun = load_file(head / "model.safetensors")
    assert not torch.equal(saved["fc.weight"], begun["fc.weight"])
