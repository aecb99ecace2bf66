import multiprocessing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from protocol.errors import EngineError
from protocol.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.registry import make_engine
from tests.contracts.engine_bench import MAX_MODEL_LEN, Bench
from tests.contracts.engine_models import adapted, tiny_model, weights
from tests.contracts.engine_suite import EngineContract
from tests.contracts.sglang_environment import sglang_settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*"),
]


@dataclass(frozen=True)
class Setup:
    """An engine under test. The starts of one engine differ in all that matters: policy, ranks."""

    name: str
    kv: KvPolicy
    ranks: int = 1
    lora: LoraConfig = NO_ADAPTERS


PARTIAL = LoraConfig(rank=8, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
"""Fused layers of which a part has no adapter."""
SGLANG = [pytest.mark.engine, pytest.mark.timeout(900)]  # its start counts as part of the first test
SETUPS = [
    pytest.param(Setup("scripted", KvPolicy.KEEP), id="scripted"),
    pytest.param(Setup("hf", KvPolicy.RECOMPUTE), id="hf-recompute"),
    pytest.param(Setup("hf", KvPolicy.KEEP), id="hf-keep"),
    pytest.param(Setup("vllm", KvPolicy.RECOMPUTE), id="vllm-recompute", marks=pytest.mark.engine),
    pytest.param(Setup("vllm", KvPolicy.KEEP, ranks=2), id="vllm-keep-tp2", marks=pytest.mark.engine),
    pytest.param(Setup("hf", KvPolicy.KEEP, lora=LoraConfig(rank=4)), id="hf-lora"),
    pytest.param(Setup("vllm", KvPolicy.RECOMPUTE, lora=LoraConfig(rank=8)), id="vllm-lora", marks=pytest.mark.engine),
    pytest.param(Setup("vllm", KvPolicy.KEEP, ranks=2, lora=PARTIAL), id="vllm-lora-tp2", marks=[pytest.mark.engine, pytest.mark.slow]),
    pytest.param(Setup("sglang", KvPolicy.RECOMPUTE), id="sglang-recompute", marks=SGLANG),
    pytest.param(Setup("sglang", KvPolicy.KEEP), id="sglang-keep", marks=SGLANG),
    pytest.param(Setup("sglang", KvPolicy.KEEP, ranks=2), id="sglang-tp2", marks=[*SGLANG, pytest.mark.slow]),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SETUPS)
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    setup: Setup = request.param
    models = {"A": tiny_model(1), "B": tiny_model(2)}
    published = {name: weights(model) for name, model in models.items()}
    directory: Path = tmp_path_factory.mktemp(setup.name)
    models["A"].save_pretrained(directory / "model")
    if setup.lora.rank:
        made = {name: adapted(models["A"], setup.lora, seed) for seed, name in enumerate(models)}
        models, published = {name: model for name, (model, _) in made.items()}, {name: adapter for name, (_, adapter) in made.items()}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    own = sglang_settings(setup.ranks) if setup.name == "sglang" else {}
    config = EngineConfig(
        name=setup.name, max_model_len=MAX_MODEL_LEN, kv=setup.kv, tensor_parallel_size=setup.ranks, seconds_per_token=0.001, **own
    )
    engine = make_engine(config, directory / "model", f"{setup.name}.test", setup.lora)
    await engine.start()
    try:
        yield Bench(engine, setup.kv, models, directory, published, computes=setup.name != "scripted")
    finally:
        await engine.close()
        await engine.close()
    with pytest.raises(EngineError):
        await engine.generate(Request("late/0", (1,), Sampling(max_tokens=1)))
    # multiprocessing's resource tracker belongs to the test's process, not to the engine
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before and "resource_tracker" not in " ".join(c.cmdline())]
    assert not left, left
    assert not multiprocessing.active_children()


class TestEngine(EngineContract):
    pass
