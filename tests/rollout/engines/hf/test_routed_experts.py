"""Tests that the engine tells which experts its model chose, token by token, as transformers itself says."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from protocol.errors import EngineSettingsError
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.hf.engine import HFEngine

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
CONFIG = EngineConfig(name="hf", max_model_len=40, max_running=3, enable_return_routed_experts=True)


def make_model() -> PreTrainedModel:
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


async def complete(model_dir: Path, prompts: list[tuple[int, ...]]) -> list[Completion]:
    engine = HFEngine(CONFIG, model_dir, "engine.0")
    try:
        await engine.start()
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    engine.generate(Request(str(n), prompt, Sampling(max_tokens=5 + 2 * n, seed=n))),
                    name=f"request-{n}",
                )
                for n, prompt in enumerate(prompts)
            ]
        return [task.result() for task in running]
    finally:
        await engine.close()


@torch.no_grad()
def chosen_by(model: PreTrainedModel, tokens: list[int]) -> NDArray[np.uint16]:
    """From transformers' own record of the logits of its routers, [tokens, layers, K]."""
    logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.stack([layer.topk(2).indices.numpy() for layer in logits], axis=1).astype(np.uint16)


async def test_experts_are_those_of_every_input(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    prompts = [(5, 6, 7), (8,), (9, 10, 11, 12, 13), (1, 2)]
    for prompt, completion in zip(prompts, await complete(tmp_path, prompts), strict=True):
        assert completion.experts is not None
        inputs = [*prompt, *completion.tokens][:-1]
        np.testing.assert_array_equal(np.sort(completion.experts), np.sort(chosen_by(model, inputs)))


async def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    engine = HFEngine(CONFIG, tmp_path, "engine.0")
    with pytest.raises(
        EngineSettingsError, match=r"enable_return_routed_experts: Qwen2ForCausalLM has no router"
    ):
        await engine.start()
    await engine.close()
