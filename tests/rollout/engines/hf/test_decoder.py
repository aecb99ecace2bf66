"""Tests that models whose cache holds something else are decoded as transformers computes each sequence."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.hf.engine import HFEngine
from tests.trainer.fsdp.tiny_models import save_tiny

PROMPTS = [(3, 4, 5), (7, 8, 9, 10, 11, 12), (20,)]


async def complete(model_dir: Path) -> list[Completion]:
    engine = HFEngine(EngineConfig(name="hf", max_model_len=40, max_running=3), model_dir, "engine.0")
    try:
        await engine.start()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    engine.generate(Request(str(n), prompt, Sampling(max_tokens=4 + n, seed=n))),
                    name=f"request-{n}",
                )
                for n, prompt in enumerate(PROMPTS)
            ]
        return [task.result() for task in running]
    finally:
        await engine.close()


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "mamba2", "plbart"])
async def test_log_probabilities_equal_a_pass_over_the_whole_sequence(
    tmp_path: Path, model_type: str
) -> None:
    """Layers have a state, a model no keys and values, another one counts positions by itself."""
    model_dir = save_tiny(model_type, tmp_path)
    found = await complete(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
