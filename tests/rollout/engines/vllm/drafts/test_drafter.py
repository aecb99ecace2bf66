"""Tests what is counted of drafts, and that a head drafts with the version that is live."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from rollout.engines.base import Engine, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.contract.models import weights, write_shm
from rollout.engines.registry import make_engine
from rollout.engines.vllm.drafts.drafter import VerifiedDrafts, repair_rejection
from rollout.staging.staging import digest_of
from tests.changes import VLLM, slow_unless_changed
from tests.contracts.engine_draft_models import tiny_shallow, write_eagle
from tests.contracts.vllm_overlap import started


def test_accepted_share_counts_drafts_that_were_verified() -> None:
    drafts = VerifiedDrafts()
    assert drafts.accepted is None
    drafts.add(["a", "b"], [[1], [2]], {})
    assert drafts.accepted is None
    # of a's three two are accepted, of b's none; c had no draft, and d ended meanwhile
    drafts.add(["a", "b", "c", "d"], [[1, 2, 3], [4], [5], []], {"a": [1, 2, 9], "b": [8], "d": [1, 1]})
    assert drafts.accepted == 0.5


@pytest.mark.parametrize("drafts", [[0, 0], [2, 1]], ids=["none", "three"])
def test_top_k_limits_the_drafts_of_a_step_on_a_cpu_also_if_there_are_none(
    monkeypatch: pytest.MonkeyPatch, drafts: list[int]
) -> None:
    from vllm.v1.sample import rejection_sampler

    for name in ("expand_batch_to_tokens", "apply_top_k_top_p"):  # undone after the test
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    repair_rejection()
    logits = torch.arange(4.0).repeat(sum(drafts), 1)
    parameters = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 2.0]), top_k=torch.tensor([1, 2]), top_p=None
    )
    limited = rejection_sampler.apply_sampling_constraints(logits, torch.tensor(drafts).cumsum(0), parameters)
    nothing = -torch.inf
    expected = [[nothing, nothing, nothing, 6.0]] * 2 + [[nothing, nothing, 1.0, 1.5]]
    assert limited.tolist() == expected[: sum(drafts)]


def own_tensors(place: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a head by vLLM's names, where projections of one input are one tensor."""
    found = load_file(place / "model.safetensors")
    layer, joined = "layers.0.", {"self_attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}
    fused = {
        f"{layer}{name}_proj.weight": torch.cat(
            [found[f"{layer}{name.partition('.')[0]}.{part}_proj.weight"] for part in parts]
        )
        for name, parts in joined.items()
    }
    kept = ("self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm")
    plain = {f"{layer}{name}.weight": found[f"{layer}{name}.weight"] for name in kept}
    return {f"model.{name}": it for name, it in {**fused, **plain, "fc.weight": found["fc.weight"]}.items()}


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    target = tiny_shallow(1)
    target.save_pretrained(tmp_path / "model")
    config = EngineConfig(
        name="vllm",
        max_model_len=512,
        kv=KvPolicy.KEEP,
        drafts="model_always",
        draft_model=write_eagle(target, tmp_path),
        num_speculative_tokens=3,
    )
    engine = make_engine(config, tmp_path / "model", "vllm.test")
    async with started(engine):
        yield engine


@slow_unless_changed(*VLLM)
@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*")
async def test_a_head_drafts_by_the_embeddings_of_the_version_that_is_live(
    engine: Engine, tmp_path: Path
) -> None:
    """A head with the embeddings or the output layer of another version would draft nearly nothing."""
    assert engine.draft_digest == f"{digest_of(own_tensors(tmp_path / 'eagle')):016x}"
    for version, seed in enumerate((2, 3, 4)):
        manifest = write_shm(tmp_path / f"v{version}", weights(tiny_shallow(seed)), version)
        await engine.stage(manifest)
        await engine.commit(manifest)
        prompts = [(5 + number, 17, 200) for number in range(4)]
        cold = Sampling(max_tokens=200, temperature=0.1)  # answers at 0 would soon repeat a few tokens
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                request = Request(f"v{version}-{number}/0", prompt, cold)
                group.create_task(engine.generate(request), name=request.id)
        assert ((await engine.occupancy()).drafts_accepted or 0) > 0.5
