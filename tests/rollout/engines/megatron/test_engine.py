"""Tests the engine `megatron` beyond the contract suite: model families, slots, its own settings."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import Completion, EngineConfig, Occupancy, Request, Sampling
from rollout.engines.contract.bench import ask, together
from rollout.engines.contract.models import weights, write_shm
from rollout.engines.megatron.engine import MegatronEngine
from tests.changes import slow_unless_changed
from tests.contracts.engine_models import adapted
from tests.trainer.megatron.models import ALL_MODELS, HYBRIDS, OPTIMIZER, make_model, save_model
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.batch import Batch, StepTotals
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.inference.model import CachedModel

pytestmark = slow_unless_changed(
    "rollout/engines/megatron/", "rollout/engines/in_process/", "trainer/megatron/inference",
    "trainer/megatron/layers/",
)  # fmt: skip

LENGTH = 64
"""max_model_len."""
PAGE_BYTES = 16 * 2 * 2 * 2 * 32 * 4
"""Tokens, layers, key and value, kv heads, head size, bytes of an element: of `qwen2` in float32."""


@asynccontextmanager
async def started(
    model_dir: Path, *, lora: LoraConfig = NO_ADAPTERS, **settings: Any
) -> AsyncIterator[MegatronEngine]:
    engine = MegatronEngine(
        EngineConfig(**{"name": "megatron", "max_model_len": LENGTH, **settings}), model_dir, "e", lora
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def ragged_requests(count: int, vocabulary: int) -> list[Request]:
    """Prompts and completions of all lengths, greedy."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, LENGTH // 2, (count, 2), generator=generator).tolist()
    prompts = [torch.randint(0, vocabulary, (size,), generator=generator).tolist() for size, _ in sizes]
    return [
        ask(f"r{i}", prompt, tokens)
        for i, (prompt, (_, tokens)) in enumerate(zip(prompts, sizes, strict=True))
    ]


@torch.no_grad()
def is_greedy(model: PreTrainedModel, request: Request, found: Completion) -> bool:
    ids = torch.tensor([[*request.prompt, *found.tokens]])
    logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
    return (
        logits.argmax(-1).tolist() == list(found.tokens) and len(found.tokens) == request.sampling.max_tokens
    )


@pytest.mark.parametrize("name", sorted(set(ALL_MODELS) - {*HYBRIDS}))
async def test_ragged_requests_in_few_slots_and_small_passes_are_greedy(name: str, tmp_path: Path) -> None:
    model, requests = make_model(name).eval(), ragged_requests(24, int(ALL_MODELS[name][1]["vocab_size"]))
    if name == "phi3-longrope":  # the engine rotates all sequences as long ones
        model.config.rope_parameters["original_max_position_embeddings"] = 0
    async with started(save_model(name, tmp_path), max_running=5, max_batch_tokens=LENGTH) as engine:
        found = await together(engine, requests)
    assert all(
        is_greedy(model, request, completion) for request, completion in zip(requests, found, strict=True)
    )


async def test_buffer_size_bounds_the_cache_and_every_request_ends(tmp_path: Path) -> None:
    model, model_dir = make_model("qwen2").eval(), save_model("qwen2", tmp_path)
    requests = [ask(f"r{i}", (i, 5), 60) for i in range(7)]
    buffer_bytes = 6.5 * PAGE_BYTES
    async with started(model_dir, buffer_size_gb=buffer_bytes / 2**30) as engine:
        assert engine._cached_model is not None
        assert engine._cached_model.pages == 6
        found = await together(engine, requests)
        assert await engine.occupancy() == Occupancy(0, 0.0)
    assert all(is_greedy(model, request, found) for request, found in zip(requests, found, strict=True))


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss", "deepseek-v3"])
async def test_committed_adapter_computes_as_if_it_were_merged(name: str, tmp_path: Path) -> None:
    model_dir, lora = save_model(name, tmp_path), LoraConfig(rank=4, alpha=64.0)
    model, adapter = adapted(make_model(name).eval(), lora, 1)
    requests = ragged_requests(12, int(ALL_MODELS[name][1]["vocab_size"]))
    async with started(model_dir, lora=lora, max_running=5) as engine:
        before = await together(engine, requests)
        version = write_shm(tmp_path / "v0", adapter, 0)
        await engine.stage(version)
        await engine.commit(version)
        after = await together(engine, requests)
        assert await engine.live_digest() == version.digest
        assert engine.served.version == 0
    for request, base, found in zip(requests, before, after, strict=True):
        assert is_greedy(make_model(name).eval(), request, base)
        assert is_greedy(model, request, found)
    assert [found.tokens for found in before] != [found.tokens for found in after]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_batch_tokens": LENGTH - 1}, f"max_batch_tokens is {LENGTH - 1}.* at least {LENGTH}"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is -1"),
        ({"max_running": 100, "max_batch_tokens": 99}, "max_batch_tokens is 99.* at least 100"),
        ({"max_model_len": 129}, "max_model_len 129 exceeds the 128 positions"),
        ({"buffer_size_gb": 1e-6}, "KV cache of one sequence of 64 tokens"),
        ({"max_model_len": 128, "max_running": 2**40}, "lower max_running or set buffer_size_gb: .*memory"),
        ({"buffer_size_gb": -1.0}, "buffer_size_gb is -1.0"),
    ],
)
async def test_unsupported_setting_is_refused_by_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=f"^(engine megatron: )?.*{words}"):
        async with started(save_model("qwen2", tmp_path), **settings):
            pass


async def test_a_model_with_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no cache for the states of gated delta nets"):
        async with started(save_model("qwen3.5", tmp_path)):
            pass


async def test_family_that_the_trainer_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 7}')
    with pytest.raises(
        EngineSettingsError, match=r"engine megatron: .*model_type 'gpt2' is not supported; supported are"
    ):
        async with started(tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2", "float32"),
        ("qwen2", "bfloat16"),
        ("gpt-oss", "float32"),
        ("deepseek-v2-dense", "float32"),
        ("deepseek-v3", "float32"),
    ],
)
async def test_logprobs_are_those_of_the_training_forward_pass(name: str, dtype: str, tmp_path: Path) -> None:
    model_dir = save_model(name, tmp_path)
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=0.7, seed=i))
        for i, request in enumerate(ragged_requests(8, int(ALL_MODELS[name][1]["vocab_size"])))
    ]
    async with started(model_dir, dtype=dtype) as engine:
        found = await together(engine, requests)
    batch = batch_of(requests, found)
    settings = TrainerConfig(device="cpu", dtype=dtype)
    backend = MegatronBackend(
        model_dir, parallel=ParallelConfig(), optimizer=OPTIMIZER, trainer=settings, algorithm=ALGORITHM
    )
    recomputed = backend.logprobs(batch)
    backend.close()
    difference = (recomputed - batch.behaviour_logprobs)[batch.sampled_mask].abs()
    assert difference.max() < (1e-5 if dtype == "float32" else 0.05), (difference.max(), difference.mean())


async def test_experts_are_those_that_transformers_chooses(tmp_path: Path) -> None:
    model_dir = save_model("qwen3-moe", tmp_path)
    requests = ragged_requests(6, 96)
    async with started(model_dir, enable_return_routed_experts=True, max_running=4) as engine:
        found = await together(engine, requests)
    model = make_model("qwen3-moe").eval()
    for request, completion in zip(requests, found, strict=True):
        inputs = torch.tensor([[*request.prompt, *completion.tokens][:-1]])
        with torch.no_grad():
            logits = model(inputs, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(3).indices for layer in logits], dim=1)
        assert completion.experts is not None
        assert torch.equal(
            torch.from_numpy(completion.experts.astype(int)).sort().values, chosen.sort().values
        )


async def test_model_without_experts_cannot_record_any(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match="enable_return_routed_experts: the model has no experts"):
        async with started(save_model("qwen2", tmp_path), enable_return_routed_experts=True):
            pass


def batch_of(requests: Sequence[Request], found: Sequence[Completion]) -> Batch:
    pairs = list(zip(requests, found, strict=True))
    lengths = torch.tensor([len(request.prompt) + len(completion.tokens) for request, completion in pairs])
    tokens = [token for request, completion in pairs for token in (*request.prompt, *completion.tokens)]
    sampled = [
        flag
        for request, completion in pairs
        for flag in [False] * len(request.prompt) + [True] * len(completion.tokens)
    ]
    logprobs = [
        value
        for request, completion in pairs
        for value in [0.0] * len(request.prompt) + list(completion.logprobs)
    ]
    mask, nothing = torch.tensor(sampled), torch.zeros(len(requests))
    return Batch(
        step=0,
        totals=StepTotals(len(requests), int(mask.sum()), lag_max=0, fresh=True),
        offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        loss_mask=mask,
        sampled_mask=mask,
        behaviour_logprobs=torch.tensor(logprobs),
        versions=torch.where(mask, 0, -1).int(),
        advantages=torch.zeros(len(tokens)),
        group_index=nothing.long(),
        rewards=nothing,
        weights=nothing,
        measured=nothing.bool(),
        temperature=0.7,
    )


def test_page_keeps_nothing_of_weights_that_were_not_finite(tmp_path: Path) -> None:
    model = CachedModel(save_model("qwen2", tmp_path), dtype="float32", running=2, length=LENGTH)
    good = {name: parameter.clone() for name, parameter in model.parameters.items()}
    for parameter in model.parameters.values():
        parameter.fill_(torch.nan)
    pages = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert model.prefill([[1] * 60, [2] * 60], pages).isnan().all()
    for name, parameter in model.parameters.items():
        parameter.copy_(good[name])
    model.cache.clear([0, 4, 5, 6])
    model.prefill([[1, 2, 3], [5] * 40], [[0], [4, 5, 6]])
    assert model.decode([4, 6], [3, 40], [[0], [4, 5, 6]]).isfinite().all()
    model.close()


async def test_sleeping_megatron_engine_holds_neither_weights_nor_cache(tmp_path: Path) -> None:
    async with started(save_model("qwen2", tmp_path)) as engine:
        await engine.generate(Request("a/0", (1,), Sampling(max_tokens=2)))
        loaded, model = engine._model, engine._cached_model
        assert model is not None
        held = [
            *model.parameters.values(),
            *model.cache.tensors,
            *loaded.weights.live.values(),
            *loaded.weights.buffer.values(),
        ]
        await engine.sleep()
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        await engine.wake()
        assert all(tensor.untyped_storage().nbytes() for tensor in held)


async def test_padded_steps_generate_what_exact_ones_do_through_updates_and_sleep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = save_model("qwen2", tmp_path / "model")
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=0.7, seed=i))
        for i, request in enumerate(ragged_requests(24, 131))
    ]
    model = make_model("qwen2")
    for parameter in model.parameters():
        parameter.data += 0.01
    version = write_shm(tmp_path / "v0", weights(model), 0)
    found = []
    for eager in (True, False):
        few = 9.5 * PAGE_BYTES / 2**30  # so that requests give their pages back
        async with started(model_dir, enforce_eager=eager, max_running=5, buffer_size_gb=few) as engine:
            found.append(await together(engine, requests))
            assert engine._cached_model is not None
            sizes = {size for size, _ in engine._cached_model.graphs.steps}
            assert sizes <= {1, 2, 4, 5}
            assert bool(sizes) == (not eager)
            await engine.sleep()
            assert not engine._cached_model.graphs.steps
            await engine.wake()
            await engine.stage(version)
            await engine.commit(version)
            found[-1] += await together(engine, requests)
    for exact, padded in zip(*found, strict=True):
        assert (exact.tokens, exact.spans) == (padded.tokens, padded.spans)
        assert padded.logprobs == pytest.approx(exact.logprobs, abs=1e-5)
    assert [r.message for r in caplog.records if "eager" in r.message] == [
        "engine.eager reason='there is no GPU'"
    ]


@pytest.mark.parametrize(
    ("staging", "lora"),
    [("device", NO_ADAPTERS), ("host", NO_ADAPTERS), ("layers", NO_ADAPTERS), ("device", LoraConfig(rank=4))],
)
async def test_commit_leaves_all_that_a_graph_reads_in_its_place(
    staging: str, lora: LoraConfig, tmp_path: Path
) -> None:
    model = make_model("qwen2").eval()
    async with started(save_model("qwen2", tmp_path / "model"), staging=staging, lora=lora) as engine:
        cached = engine._cached_model
        assert cached is not None

        def places() -> list[int]:
            rotaries = (rotary.frequencies for rotary in cached.module.rotaries)
            found = [*cached.module.parameters(), *cached.module.buffers(), *cached.cache.tensors, *rotaries]
            return [tensor.data_ptr() for tensor in found]

        before, values = places(), {name: held.clone() for name, held in cached.parameters.items()}
        for number in range(2):
            made = adapted(model, lora, number + 1)[1] if lora.rank else weights(model)
            tensors = {name: tensor + 0.01 * (number + 1) for name, tensor in made.items()}
            version = write_shm(tmp_path / f"v{number}", tensors, number)
            await engine.stage(version)
            await engine.commit(version)
            assert places() == before
            assert all(not torch.equal(values[n], held) for n, held in cached.parameters.items())


async def test_close_destroys_the_process_groups(tmp_path: Path) -> None:
    model_dir = save_model("qwen2", tmp_path)
    async with started(model_dir) as first:
        async with started(model_dir) as second:
            await second.generate(Request("a/0", (1,), Sampling(max_tokens=2)))
        await first.generate(Request("a/0", (1,), Sampling(max_tokens=2)))
    assert not torch.distributed.is_initialized()
