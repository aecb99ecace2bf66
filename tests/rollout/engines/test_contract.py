"""Tests every engine with the contract suites, in the set-ups of `SETUPS`."""

import copy
import json
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch

from protocol.errors import EngineError
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.contract.bench import MAX_MODEL_LEN, Bench
from rollout.engines.contract.models import weights
from rollout.engines.contract.suite import EngineContract
from rollout.engines.registry import make_engine
from rollout.engines.vllm.launch import shared_files
from tests.contracts.engine_commits import CommitContract
from tests.contracts.engine_draft_models import DRAFT_MODELS, with_heads
from tests.contracts.engine_drafts import DraftContract
from tests.contracts.engine_models import adapted
from tests.contracts.engine_sessions import SessionContract
from tests.contracts.engine_setups import MARGINS, MODELS, SETUPS, Setup
from tests.contracts.engine_sleep import SleepContract, sleeper  # noqa: F401 (a fixture)
from tests.contracts.sglang_environment import sglang_beside_others
from tests.contracts.sglang_jax_environment import sglang_jax_settings
from tests.contracts.vllm_overlap import overlapping

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*"),
]


GENERATION_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.2,
    "min_p": 0.4,
    "repetition_penalty": 3.0,
    "eos_token_id": 7,
}
"""What a model's generation_config.json recommends, and no engine may apply."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SETUPS)
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    setup: Setup = request.param
    dtype: torch.dtype = getattr(torch, setup.dtype)
    tiny = MODELS[setup.model]
    models = {"A": tiny(1, dtype=dtype), "B": tiny(2, dtype=dtype)}
    published = {name: weights(model, dtype) for name, model in models.items()}
    directory: Path = tmp_path_factory.mktemp(setup.name)
    copy.deepcopy(models["A"]).to(dtype).save_pretrained(directory / "model")
    (directory / "model/generation_config.json").write_text(json.dumps(GENERATION_DEFAULTS))
    if setup.lora.rank:
        made = {name: adapted(models["A"], setup.lora, seed, dtype) for seed, name in enumerate(models)}
        models, published = (
            {name: model for name, (model, _) in made.items()},
            {name: adapter for name, (_, adapter) in made.items()},
        )
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    own = (
        sglang_beside_others(setup.ranks)
        if setup.name == "sglang"
        else sglang_jax_settings()
        if setup.name == "sglang_jax"
        else {}
    )
    config = EngineConfig(
        name=setup.name,
        dtype=setup.dtype,
        max_model_len=MAX_MODEL_LEN,
        kv=setup.kv,
        tensor_parallel_size=setup.ranks,
        enforce_eager=not setup.graphs,
        enable_sleep_mode=setup.sleeps,
        drafts=setup.drafts,
        draft_model=(head := setup.drafted_by and DRAFT_MODELS[setup.drafted_by](models["A"], directory)),
        draft_lr=setup.draft_lr,
        num_speculative_tokens=3 if setup.drafted_by else 8,
        staging=setup.staging,
        seconds_per_token=0.001,
        **{"memory_fraction": 0.1, **own, "arguments": {**own.get("arguments", {}), **setup.arguments}},
    )
    shared = directory / "engine.msgpack" if setup.shares else None
    engine = make_engine(config, directory / "model", f"{setup.name}.test", setup.lora, shared=shared)
    with overlapping(engine) if setup.overlaps else nullcontext():
        await engine.start()
    files = shared_files({child.pid for child in psutil.Process().children(recursive=True)})
    made_bench = Bench(
        engine,
        setup.kv,
        models,
        directory,
        with_heads(published, Path(head)) if setup.draft_lr else published,
        margin=MARGINS[setup.dtype] if setup.margin is None else setup.margin,
        computes=setup.name != "scripted",
        pilots=3 if setup.name == "sglang" else 1,
        shares=setup.shares and not setup.lora.rank,
        layers=setup.staging == "layers",
        caches=setup.name in ("vllm", "sglang")
        and (setup.model != "latent" or torch.cuda.is_available()),  # vLLM on a CPU turns it off
        min_accepted=None if setup.drafts == "off" else 0.0 if setup.drafted_by == "eagle3" else 0.1,
    )
    try:
        yield made_bench
    finally:
        await engine.close()
        await engine.close()
        for room in made_bench.rooms:
            room.close()
    assert shared is None or not shared.exists()
    with pytest.raises(EngineError):
        await engine.generate(Request("late/0", (1,), Sampling(max_tokens=1)))
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before and is_engines(child)
    ]
    assert not left, left
    assert not multiprocessing.active_children()
    assert not any(path.exists() for path in files)


def is_engines(child: psutil.Process) -> bool:
    """Tell processes of the engine from the test's own: a resource tracker, torch's compilers."""
    try:
        command = " ".join(child.cmdline())
        return "resource_tracker" not in command and "compile_worker" not in command
    except psutil.NoSuchProcess:
        return False


class TestEngine(CommitContract, SleepContract, SessionContract, DraftContract, EngineContract):
    """pytest takes the last base first, and its first test wants a fresh engine."""
