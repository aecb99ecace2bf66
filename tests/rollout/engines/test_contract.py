"""Tests every engine with the contract suites, in the set-ups of `SETUPS`."""

import json
import multiprocessing
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import pytest_asyncio
import torch

from protocol.errors import EngineError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.contract.bench import MAX_MODEL_LEN, Bench
from rollout.engines.contract.models import tiny_model, weights
from rollout.engines.contract.suite import EngineContract
from rollout.engines.registry import make_engine
from rollout.engines.vllm.launch import shared_files
from tests.changes import IN_PROCESS, SGLANG, VLLM, slow_unless_changed
from tests.contracts.engine_commits import CommitContract
from tests.contracts.engine_drafts import DraftContract
from tests.contracts.engine_models import adapted, tiny_experts
from tests.contracts.engine_sessions import SessionContract
from tests.contracts.engine_sleep import SleepContract, sleeper  # noqa: F401 (a fixture)
from tests.contracts.sglang_environment import sglang_settings
from tests.contracts.sglang_jax_environment import sglang_jax_settings
from tests.contracts.vllm_overlap import overlapping
from tests.gpus import TWO_GPUS

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
    sleeps: bool = False
    """vLLM and SGLang: started so that it can."""
    dtype: str = "float32"
    graphs: bool = False
    """CUDA graphs are captured and replayed."""
    experts: bool = False
    """The model has experts."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Given to vLLM or SGLang as they are."""
    shares: bool = False
    """Its live weights can be mapped, and versions come out of masters."""
    drafts: Literal["off", "history", "history_always"] = "off"
    staging: Literal["device", "host", "layers"] = "device"
    """Where versions are staged."""
    overlaps: bool = False
    """vLLM on a CPU: its scheduler is a step ahead, as it always is on a GPU."""


PARTIAL = LoraConfig(rank=8, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
"""Fused layers of which a part has no adapter."""


MARGINS = {"float32": 0.0, "float16": 0.0025, "bfloat16": 0.02}
"""Three times what rounding does to a logit of the tiny model."""


def engine_under_test(name: str, setup: Setup, *marks: pytest.MarkDecorator) -> Any:
    """One start of the engine for all its tests: they stay in one process."""
    return pytest.param(setup, id=name, marks=[*marks, pytest.mark.xdist_group(name)])


ENGINE, SLOW, GPU = pytest.mark.engine, pytest.mark.slow, pytest.mark.gpu
OTHER_SETUP = slow_unless_changed(*IN_PROCESS)
LONG_START = pytest.mark.timeout(900)  # SGLang's start counts as part of the first test
SETUPS = [
    engine_under_test("scripted", Setup("scripted", KvPolicy.KEEP)),
    engine_under_test("hf-recompute", Setup("hf", KvPolicy.RECOMPUTE)),
    engine_under_test("hf-keep", Setup("hf", KvPolicy.KEEP), OTHER_SETUP),
    engine_under_test("hf-host", Setup("hf", KvPolicy.KEEP, staging="host")),
    engine_under_test("hf-layers", Setup("hf", KvPolicy.RECOMPUTE, staging="layers")),
    engine_under_test("hf-lora", Setup("hf", KvPolicy.KEEP, lora=LoraConfig(rank=4))),
    engine_under_test("hf-experts", Setup("hf", KvPolicy.RECOMPUTE, experts=True), OTHER_SETUP),
    engine_under_test("hf-shared", Setup("hf", KvPolicy.RECOMPUTE, shares=True), OTHER_SETUP),
    engine_under_test("megatron-recompute", Setup("megatron", KvPolicy.RECOMPUTE)),
    engine_under_test("megatron-keep", Setup("megatron", KvPolicy.KEEP), OTHER_SETUP),
    engine_under_test(
        "megatron-layers", Setup("megatron", KvPolicy.RECOMPUTE, staging="layers"), OTHER_SETUP
    ),
    engine_under_test("megatron-shared", Setup("megatron", KvPolicy.RECOMPUTE, shares=True), OTHER_SETUP),
    engine_under_test("megatron-lora", Setup("megatron", KvPolicy.RECOMPUTE, lora=PARTIAL), OTHER_SETUP),
    engine_under_test("megatron-tp2", Setup("megatron", KvPolicy.RECOMPUTE, ranks=2), SLOW),
    engine_under_test("megatron-lora-tp2", Setup("megatron", KvPolicy.KEEP, ranks=2, lora=PARTIAL), SLOW),
    engine_under_test("megatron-gpu", Setup("megatron", KvPolicy.RECOMPUTE), GPU),
    engine_under_test(
        "vllm-recompute",
        Setup("vllm", KvPolicy.RECOMPUTE, overlaps=True),
        ENGINE,
        slow_unless_changed(*VLLM),
    ),
    engine_under_test(
        "vllm-layers",
        Setup("vllm", KvPolicy.KEEP, staging="layers", overlaps=True),
        ENGINE,
        slow_unless_changed(*VLLM),
    ),
    engine_under_test(
        "vllm-host-tp2",
        Setup("vllm", KvPolicy.RECOMPUTE, ranks=2, staging="host", overlaps=True),
        ENGINE,
        slow_unless_changed(*VLLM),
    ),
    engine_under_test(
        "vllm-layers-tp2",
        Setup("vllm", KvPolicy.RECOMPUTE, ranks=2, staging="layers", overlaps=True),
        ENGINE,
        SLOW,
    ),
    engine_under_test("vllm-keep", Setup("vllm", KvPolicy.KEEP, overlaps=True), ENGINE, SLOW),
    engine_under_test("vllm-keep-tp2", Setup("vllm", KvPolicy.KEEP, ranks=2, overlaps=True), ENGINE, SLOW),
    engine_under_test("vllm-one-by-one", Setup("vllm", KvPolicy.RECOMPUTE), ENGINE, SLOW),
    engine_under_test(
        "vllm-drafts", Setup("vllm", KvPolicy.RECOMPUTE, drafts="history_always"), ENGINE, SLOW
    ),
    engine_under_test("vllm-lora", Setup("vllm", KvPolicy.RECOMPUTE, lora=LoraConfig(rank=12)), ENGINE, SLOW),
    engine_under_test(
        "vllm-lora-experts",
        Setup("vllm", KvPolicy.KEEP, lora=LoraConfig(rank=3), experts=True),
        ENGINE,
        SLOW,
    ),
    engine_under_test("vllm-lora-tp2", Setup("vllm", KvPolicy.KEEP, ranks=2, lora=PARTIAL), ENGINE, SLOW),
    engine_under_test(
        "vllm-ep2",
        Setup("vllm", KvPolicy.RECOMPUTE, ranks=2, experts=True, arguments={"enable_expert_parallel": True}),
        ENGINE,
        SLOW,
    ),
    engine_under_test("vllm-shared", Setup("vllm", KvPolicy.RECOMPUTE, shares=True), ENGINE, SLOW),
    engine_under_test("vllm-sleeps", Setup("vllm", KvPolicy.KEEP, sleeps=True), ENGINE, GPU),
    engine_under_test(
        "vllm-lora-sleeps",
        Setup("vllm", KvPolicy.RECOMPUTE, dtype="float16", lora=LoraConfig(rank=8), sleeps=True),
        ENGINE,
        GPU,
    ),
    engine_under_test(
        "vllm-graphs", Setup("vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True), ENGINE, GPU
    ),
    engine_under_test(
        "vllm-drafts-graphs",
        Setup("vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True, drafts="history_always"),
        ENGINE,
        GPU,
    ),
    engine_under_test(
        "sglang-recompute",
        Setup("sglang", KvPolicy.RECOMPUTE, sleeps=True),
        ENGINE,
        LONG_START,
        slow_unless_changed(*SGLANG),
    ),
    engine_under_test(
        "sglang-lora",
        Setup("sglang", KvPolicy.RECOMPUTE, lora=PARTIAL, sleeps=True),
        ENGINE,
        LONG_START,
        SLOW,
    ),
    engine_under_test(
        "sglang-lora-tp2",
        Setup("sglang", KvPolicy.KEEP, ranks=2, lora=PARTIAL, sleeps=True),
        ENGINE,
        LONG_START,
        SLOW,
    ),
    engine_under_test(
        "sglang-layers",
        Setup("sglang", KvPolicy.KEEP, ranks=2, sleeps=True, staging="layers"),
        ENGINE,
        LONG_START,
        SLOW,
    ),
    engine_under_test(
        "sglang-host",
        Setup("sglang", KvPolicy.RECOMPUTE, sleeps=True, staging="host"),
        ENGINE,
        LONG_START,
        SLOW,
    ),
    engine_under_test("sglang-keep", Setup("sglang", KvPolicy.KEEP), ENGINE, LONG_START, SLOW),
    engine_under_test("sglang-tp2", Setup("sglang", KvPolicy.KEEP, ranks=2), ENGINE, LONG_START, SLOW),
    engine_under_test(
        "sglang-ep2",
        Setup(
            "sglang",
            KvPolicy.RECOMPUTE,
            ranks=2,
            dtype="bfloat16",
            experts=True,
            arguments={"ep_size": 2},
        ),
        ENGINE,
        LONG_START,
        *TWO_GPUS,
    ),
    engine_under_test(
        "sglang-jax-recompute", Setup("sglang_jax", KvPolicy.RECOMPUTE), ENGINE, LONG_START, SLOW
    ),
    engine_under_test(
        "sglang-jax-keep", Setup("sglang_jax", KvPolicy.KEEP, dtype="bfloat16"), ENGINE, LONG_START, SLOW
    ),
    engine_under_test(
        "sglang-sleeps",
        Setup("sglang", KvPolicy.RECOMPUTE, dtype="float16", sleeps=True),
        ENGINE,
        LONG_START,
        GPU,
    ),
    engine_under_test(
        "sglang-lora-sleeps",
        Setup("sglang", KvPolicy.KEEP, dtype="float16", lora=PARTIAL, sleeps=True),
        ENGINE,
        LONG_START,
        GPU,
    ),
    engine_under_test(
        "sglang-graphs",
        Setup("sglang", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True),
        ENGINE,
        LONG_START,
        GPU,
    ),
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
    tiny = tiny_experts if setup.experts else tiny_model
    models = {"A": tiny(1, dtype=dtype), "B": tiny(2, dtype=dtype)}
    published = {name: weights(model, dtype) for name, model in models.items()}
    directory: Path = tmp_path_factory.mktemp(setup.name)
    models["A"].save_pretrained(directory / "model")
    (directory / "model/generation_config.json").write_text(json.dumps(GENERATION_DEFAULTS))
    if setup.lora.rank:
        made = {name: adapted(models["A"], setup.lora, seed, dtype) for seed, name in enumerate(models)}
        models, published = (
            {name: model for name, (model, _) in made.items()},
            {name: adapter for name, (_, adapter) in made.items()},
        )
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    own = (
        sglang_settings(setup.ranks)
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
        memory_fraction=0.1,
        enforce_eager=not setup.graphs,
        enable_sleep_mode=setup.sleeps,
        drafts=setup.drafts,
        staging=setup.staging,
        seconds_per_token=0.001,
        arguments=dict(setup.arguments),
        **own,
    )
    shared = directory / "engine.msgpack" if setup.shares else None
    engine = make_engine(config, directory / "model", f"{setup.name}.test", setup.lora, shared=shared)
    with overlapping(engine) if setup.overlaps else nullcontext():
        await engine.start()
    files = shared_files({child.pid for child in psutil.Process().children(recursive=True)})
    pilots = 3 if setup.name == "sglang" else 1
    made_bench = Bench(
        engine,
        setup.kv,
        models,
        directory,
        published,
        margin=MARGINS[setup.dtype],
        computes=setup.name != "scripted",
        pilots=pilots,
        shares=setup.shares,
        layers=setup.staging == "layers",
        caches=setup.name in ("vllm", "sglang"),
        drafts=setup.drafts != "off",
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
    """Whether it is the engine's: multiprocessing's resource tracker is the test's own, and what ends just
    now is nobody's."""
    try:
        return "resource_tracker" not in " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return False


class TestEngine(CommitContract, SleepContract, SessionContract, DraftContract, EngineContract):
    """pytest takes the last base first, and its first test wants a fresh engine."""
