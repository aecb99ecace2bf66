"""Tests that a version brings a draft head with its target: staged, committed and digested as one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from protocol.errors import WeightError
from protocol.weights.draft_head import PREFIX
from rollout.engines.base import Engine, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.contract.models import logits_of, weights, write_shm
from rollout.engines.registry import make_engine
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.engine_draft_models import tiny_shallow, write_eagle
from tests.contracts.vllm_overlap import started
from tests.trainer.heads import ROUNDS, learnt, make_models, texts, write_random_head
from trainer.reference.eagle import EagleHead

HEAD = "model.safetensors"


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine whose head drafts by an embedding of zeros until a version brings another."""
    target = tiny_shallow(1)
    target.save_pretrained(tmp_path / "model")
    place = Path(write_eagle(target, tmp_path))
    tensors = load_file(place / HEAD)
    save_file(tensors, tmp_path / HEAD)
    save_file({**tensors, "fc.weight": torch.zeros_like(tensors["fc.weight"])}, place / HEAD)
    engine = make_engine(config_of(place, 3), tmp_path / "model", "vllm.test")
    async with started(engine):
        yield engine


def config_of(head: Path, drafted: int) -> EngineConfig:
    """Return the settings of vLLM with a head that versions have."""
    return EngineConfig(
        name="vllm",
        max_model_len=512,
        kv=KvPolicy.KEEP,
        drafts="model_always",
        draft_model=str(head),
        draft_lr=1e-3,
        num_speculative_tokens=drafted,
    )


def version_of(seed: int, head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a version: a target, and a head."""
    return weights(tiny_shallow(seed)) | {PREFIX + name: tensor for name, tensor in head.items()}


async def serve(engine: Engine, tensors: Mapping[str, torch.Tensor], place: Path, version: int) -> int:
    """Stage and commit a version; returns the digest of its manifest."""
    manifest = write_shm(place / f"v{version}", tensors, version)
    await engine.stage(manifest)
    await engine.commit(manifest)
    return manifest.digest


async def drawn(engine: Engine, seed: int, name: str) -> float:
    """Generate, check the log-probabilities against plain transformers; return the accepted share so far."""
    prompts = [(5 + number, 17, 200) for number in range(4)]
    cold = Sampling(max_tokens=150, temperature=0.1)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(engine.generate(Request(f"{name}-{i}/0", prompt, cold)))
            for i, prompt in enumerate(prompts)
        ]
    for prompt, task in zip(prompts, tasks, strict=True):
        found = task.result()
        scores = logits_of(tiny_shallow(seed), prompt, found.tokens) / cold.temperature
        expected = scores.log_softmax(-1).gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=2e-3, rtol=0)
    return (await engine.occupancy()).drafts_accepted or 0.0


@slow_unless_changed(*VLLM, "trainer/reference/eagle")
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*")
async def test_head_of_a_version_drafts_from_its_commit_on(engine: Engine, tmp_path: Path) -> None:
    loaded, passing = load_file(tmp_path / "eagle" / HEAD), load_file(tmp_path / HEAD)
    assert engine.draft_digest == ""  # versions change all that drafts

    first = await serve(engine, version_of(2, loaded), tmp_path, 0)
    assert await engine.live_digest() == first  # type: ignore[attr-defined]
    assert (before := await drawn(engine, 2, "loaded")) < 0.05
    second = await serve(engine, version_of(2, passing), tmp_path, 1)  # the same target
    assert (engine.served.digest, await engine.live_digest()) == (second, second)  # type: ignore[attr-defined]
    assert second != first
    assert (after := await drawn(engine, 2, "passing")) > before + 0.1  # of all so far
    third = await serve(engine, version_of(3, passing), tmp_path, 2)
    assert await engine.live_digest() == third  # type: ignore[attr-defined]
    assert await drawn(engine, 3, "later") > after + 0.05

    lacking = write_shm(tmp_path / "v3", weights(tiny_shallow(4)), 3)
    with pytest.raises(WeightError, match=r"version 3 lacks tensor draft_head\."):
        await engine.stage(lacking)
    broken = version_of(4, {**passing, "fc.weight": passing["fc.weight"][:, 1:].contiguous()})
    with pytest.raises(WeightError, match=r"tensor draft_head\.fc\.weight is float32\[128, 255\]"):
        await engine.stage(write_shm(tmp_path / "v4", broken, 4))
    assert await engine.live_digest() == third  # type: ignore[attr-defined]


@slow_unless_changed(*VLLM, "trainer/reference/eagle")
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*")
async def test_trained_head_drafts_in_vllm_what_it_drafts_in_training(tmp_path: Path) -> None:
    target = tiny_shallow(1)
    target.save_pretrained(tmp_path / "model")
    place = write_random_head(target, tmp_path)
    models = make_models("reference", tmp_path / "model", place)
    assert models.drafts is not None
    for step in range(ROUNDS):
        learnt(models.drafts, texts(target, step))
    head = {name.removeprefix(PREFIX): it.clone() for name, it in models.drafts.published.items()}
    models.close()
    engine = make_engine(config_of(place, 1), tmp_path / "model", "vllm.test")
    await engine.start()
    try:
        await serve(engine, version_of(1, head), tmp_path, 0)
        prompts = [(5 + number, 17, 200) for number in range(8)]
        greedy = Sampling(max_tokens=40, temperature=0.0)
        answers = [await engine.generate(Request(f"g{p[0]}/0", p, greedy)) for p in prompts]
        accepted = (await engine.occupancy()).drafts_accepted
    finally:
        await engine.close()
    trained = EagleHead(place)
    trained.load_state_dict(head)
    hits, drafts = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        hit = drafted_right(target, trained, [*prompt, *answer.tokens])
        place_of_last = len(prompt)
        while place_of_last + 1 < len(hit):
            drafts += 1
            hits += hit[place_of_last + 1]
            place_of_last += 1 + hit[place_of_last + 1]
    assert 0.2 < hits / drafts < 0.95
    assert accepted == pytest.approx(hits / drafts, abs=0.03)


@torch.no_grad()
def drafted_right(target: PreTrainedModel, head: EagleHead, tokens: list[int]) -> list[bool]:
    """Return for each token whether the head says it after the tokens before; by plain transformers."""
    ids = torch.tensor([tokens])
    states = target.model(input_ids=ids).last_hidden_state
    drafted = head(states[:, :-2], target.get_input_embeddings()(ids[:, 1:-1]))
    said = target.lm_head(drafted).argmax(-1)[0].tolist()
    return [False, False, *(mine == token for mine, token in zip(said, tokens[2:], strict=True))]


@pytest.mark.engine
async def test_an_engine_that_does_not_draft_by_it_leaves_the_head_out(tmp_path: Path) -> None:
    target = tiny_shallow(1)
    target.save_pretrained(tmp_path / "model")
    write_eagle(target, tmp_path)
    config = EngineConfig(name="hf", max_model_len=64, draft_lr=1e-3)
    engine = make_engine(config, tmp_path / "model", "hf.test")
    await engine.start()
    try:
        await serve(engine, version_of(2, load_file(tmp_path / "eagle" / HEAD)), tmp_path, 0)
        assert engine.served.version == 0
        plain = write_shm(tmp_path / "plain", weights(tiny_shallow(2)), 9).digest
        assert await engine.live_digest() == plain  # type: ignore[attr-defined]
    finally:
        await engine.close()
