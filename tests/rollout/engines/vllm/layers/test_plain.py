"""Tests what takes the place of vLLM's experts on a CPU: alone, and (slow) in an engine that is updated."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.contract.models import follows, weights, write_shm
from rollout.engines.registry import make_engine
from rollout.engines.vllm.layers.plain import ACTIVATIONS, mixture, rotate_heads_natively
from tests.contracts.engine_models import tiny_experts

PROMPT = (5, 17, 200, 33)
TOKENS, HEADS, NOPE, ROPE, LATENT = 7, 4, 128, 64, 512


@pytest.mark.xdist_group("vllm-recompute")  # the process in which the contract imports vLLM
def test_heads_of_latent_attention_are_rotated_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    rotate_heads_natively()
    torch.manual_seed(0)
    query = torch.randn(TOKENS, HEADS, NOPE + ROPE)[..., NOPE:]
    key = torch.randn(TOKENS, LATENT + ROPE)[:, LATENT:].unsqueeze(1)
    positions = torch.arange(TOKENS)
    angles = positions[:, None] / 10000 ** (torch.arange(0, ROPE, 2) / ROPE)
    turns = torch.polar(torch.ones_like(angles), angles)[None]
    expected = apply_rotary_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], turns)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            ROPE,
            max_position=TOKENS,
            is_neox_style=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            dtype=torch.float32,
        )
        found = rope.forward_cpu(positions, query.clone(), key.clone())
    for rotated, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(rotated, wanted[0].transpose(0, 1))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_mixture_is_the_weighted_sum_of_each_rows_experts(activation: str) -> None:
    rows, both, downs = torch.randn(7, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    found = mixture(rows, both, downs, weights, chosen, ACTIVATIONS[activation])
    for row in range(7):
        wanted = torch.zeros(6)
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            wanted += weight * (downs[expert] @ ACTIVATIONS[activation](both[expert] @ rows[row]))
        torch.testing.assert_close(found[row], wanted)
    gate, up = rows.chunk(2, dim=-1)
    assert torch.equal(ACTIVATIONS["gelu"](rows), F.gelu(gate) * up)


def test_mixture_with_biases_and_alternating_gates_is_that_of_transformers() -> None:
    theirs = GptOssExperts(
        GptOssConfig(hidden_size=6, intermediate_size=5, num_local_experts=4, experts_implementation="eager")
    ).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=3.0)
    rows, weights = torch.randn(7, 6).double(), torch.rand(7, 2).double()
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    found = mixture(
        rows,
        theirs.gate_up_proj.mT,
        theirs.down_proj.mT,
        weights,
        chosen,
        ACTIVATIONS["swigluoai"],
        (theirs.gate_up_proj_bias, theirs.down_proj_bias),
    )
    torch.testing.assert_close(found, theirs(rows, chosen, weights))


def test_mixture_of_ranks_is_the_sum_of_what_each_has() -> None:
    rows, both, downs = torch.randn(7, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    chosen, weights = torch.stack([torch.randperm(4)[:2] for _ in range(7)]), torch.rand(7, 2)
    places = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]])
    shares = [
        mixture(rows, both[part], downs[part], weights, place[chosen], ACTIVATIONS["silu"])
        for part, place in zip((slice(2), slice(2, 4)), places, strict=True)
    ]
    torch.testing.assert_close(sum(shares), mixture(rows, both, downs, weights, chosen, ACTIVATIONS["silu"]))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
async def test_experts_are_updated_in_place(tmp_path: Path, ranks: int) -> None:
    """On a GPU vLLM's own kernels compute, from weights that they do not repack."""
    models = [tiny_experts(seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path / "model")
    config = EngineConfig(name="vllm", max_model_len=64, tensor_parallel_size=ranks, memory_fraction=0.1)
    engine = make_engine(config, tmp_path / "model", "engine.0")
    try:
        await engine.start()
        for version, model in enumerate(models):
            if version:
                manifest = write_shm(tmp_path / "v1", weights(model), version)
                await engine.stage(manifest)
                await engine.commit(manifest)
                assert ranks > 1 or await engine.live_digest() == manifest.digest
            request = Request(f"{version}/0", PROMPT, Sampling(max_tokens=24, temperature=0))
            found = await engine.generate(request)
            assert follows([(24, model)], PROMPT, found.tokens, recompute=True, margin=1e-3)
    finally:
        await engine.close()
