"""Lists the engines that pass the contract suite, in the set-ups that differ in what matters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest

from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import KvPolicy
from rollout.engines.contract.models import tiny_model
from tests.changes import IN_PROCESS, SGLANG, VLLM, slow_unless_changed
from tests.contracts.engine_draft_models import tiny_further, tiny_shallow
from tests.contracts.engine_models import tiny_experts, tiny_gpt_oss, tiny_latent
from tests.gpus import TWO_GPUS

Model = Literal["dense", "experts", "all_experts", "experts_only", "latent", "latent_yarn", "gpt_oss"]


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
    model: Literal[
        "dense",
        "experts",
        "all_experts",
        "experts_only",
        "latent",
        "latent_yarn",
        "gpt_oss",
        "shallow",
        "further",
    ] = "dense"
    """Key of `MODELS`."""
    margin: float | None = None
    """See `Bench`; None: that of its dtype."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Given to vLLM or SGLang as they are."""
    shares: bool = False
    """Its live weights can be mapped, and versions come out of masters, but for those of adapters."""
    drafts: Literal["off", "history", "history_always", "model", "model_always"] = "off"
    drafted_by: Literal["", "small", "eagle", "eagle3", "further"] = ""
    """Key of `DRAFT_MODELS`, for drafts of a model."""
    draft_lr: float = 0.0  # above 0, versions have a head: A's drafts well, B's badly
    staging: Literal["device", "host", "layers"] = "device"
    """Where versions are staged."""
    overlaps: bool = False
    """vLLM on a CPU: its scheduler is a step ahead, as it always is on a GPU."""


PARTIAL = LoraConfig(rank=8, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
"""Fused layers of which a part has no adapter."""


MARGINS = {"float32": 0.0, "float16": 0.0025, "bfloat16": 0.02}
"""Three times what rounding does to a logit of the tiny model."""
SHALLOW = 0.12
"""Margin of the shallow model in bfloat16, whose logits are seven times as large."""
FP8 = 0.2
"""Margin of weights and activations in 8 bits."""
CACHE = {"kv_cache_memory_bytes": 1 << 30}
"""Argument with which vLLM does not profile how much memory is free, while other engines take some."""
EXPERT_PARALLEL = {"vllm": {"enable_expert_parallel": True}, "sglang": {"ep_size": 2}}
"""Engine -> arguments with which its ranks divide the experts."""
PROCESSED = (
    "rollout/staging/shadows.py",
    "rollout/engines/multi_process/processed_layers.py",
    "rollout/engines/vllm/layers/",
    "rollout/engines/sglang/layers.py",
)
"""Beginnings of further paths on which set-ups with processed weights depend."""
MODELS: Mapping[str, Callable[..., Any]] = {
    "dense": tiny_model,
    "experts": tiny_experts,
    "all_experts": partial(tiny_experts, chosen=4),
    "experts_only": partial(tiny_experts, dense=(), chosen=4),  # SGLang asks every layer for its router
    "latent": tiny_latent,
    "latent_yarn": partial(tiny_latent, yarn=True),
    "gpt_oss": tiny_gpt_oss,
    "shallow": tiny_shallow,
    "further": tiny_further,
}


def engine_under_test(name: str, setup: Setup, *marks: pytest.MarkDecorator) -> Any:
    """One start of the engine for all its tests: they stay in one process."""
    return pytest.param(setup, id=name, marks=[*marks, pytest.mark.xdist_group(name)])


def in_fp8(name: str, model: Model, *, quantization: str = "fp8", **arguments: Any) -> Setup:
    """Return a set-up of an engine on a GPU that computes with weights of 8 bits."""
    return Setup(
        name,
        KvPolicy.RECOMPUTE,
        dtype="bfloat16",
        graphs=True,
        model=model,
        margin=FP8,
        arguments={"quantization": quantization, **(CACHE if name == "vllm" else {}), **arguments},
    )


def divided(name: str, model: Model, dtype: str = "float32", **arguments: Any) -> Setup:
    """Return a set-up of an engine whose two ranks divide the experts."""
    given = {**EXPERT_PARALLEL[name], **arguments}
    return Setup(name, KvPolicy.RECOMPUTE, ranks=2, dtype=dtype, model=model, arguments=given)


ENGINE, SLOW, GPU = pytest.mark.engine, pytest.mark.slow, pytest.mark.gpu
OTHER_SETUP = slow_unless_changed(*IN_PROCESS)
DRAFTS = slow_unless_changed(
    "rollout/engines/vllm/drafts/", "rollout/engines/vllm/scheduling.py", "protocol/weights/draft_head.py"
)
BY_MODEL = partial(Setup, "vllm", drafts="model_always", model="shallow", overlaps=True)
GRAPHS = partial(Setup, "megatron", KvPolicy.RECOMPUTE, graphs=True)  # on a CPU padded steps alone
VLLM_GRAPHS = partial(Setup, "vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True, arguments=CACHE)
TRAINED = BY_MODEL(KvPolicy.RECOMPUTE, drafted_by="eagle", draft_lr=1e-3)
LONG_START = pytest.mark.timeout(900)  # SGLang's start counts as part of the first test
SETUPS = [
    engine_under_test("scripted", Setup("scripted", KvPolicy.KEEP)),
    engine_under_test("hf-recompute", Setup("hf", KvPolicy.RECOMPUTE)),
    engine_under_test("hf-keep", Setup("hf", KvPolicy.KEEP), OTHER_SETUP),
    engine_under_test("hf-host", Setup("hf", KvPolicy.KEEP, staging="host")),
    engine_under_test("hf-layers", Setup("hf", KvPolicy.RECOMPUTE, staging="layers"), OTHER_SETUP),
    engine_under_test("hf-lora", Setup("hf", KvPolicy.KEEP, lora=LoraConfig(rank=4)), OTHER_SETUP),
    engine_under_test("hf-experts", Setup("hf", KvPolicy.RECOMPUTE, model="experts"), OTHER_SETUP),
    engine_under_test("hf-shared", Setup("hf", KvPolicy.RECOMPUTE, shares=True), OTHER_SETUP),
    engine_under_test("megatron-recompute", Setup("megatron", KvPolicy.RECOMPUTE)),
    engine_under_test("megatron-keep", Setup("megatron", KvPolicy.KEEP), OTHER_SETUP),
    engine_under_test(
        "megatron-layers", Setup("megatron", KvPolicy.RECOMPUTE, staging="layers"), OTHER_SETUP
    ),
    engine_under_test("megatron-shared", Setup("megatron", KvPolicy.RECOMPUTE, shares=True), OTHER_SETUP),
    engine_under_test(
        "megatron-lora-shared",
        Setup("megatron", KvPolicy.RECOMPUTE, lora=PARTIAL, shares=True),
        OTHER_SETUP,
    ),
    engine_under_test("megatron-lora", Setup("megatron", KvPolicy.RECOMPUTE, lora=PARTIAL), OTHER_SETUP),
    engine_under_test("megatron-tp2", Setup("megatron", KvPolicy.RECOMPUTE, ranks=2), SLOW),
    engine_under_test(
        "megatron-experts-tp2", Setup("megatron", KvPolicy.RECOMPUTE, ranks=2, model="experts"), SLOW
    ),
    engine_under_test("megatron-lora-tp2", Setup("megatron", KvPolicy.KEEP, ranks=2, lora=PARTIAL), SLOW),
    engine_under_test("megatron-gpu", Setup("megatron", KvPolicy.RECOMPUTE), GPU),
    engine_under_test("megatron-padded", GRAPHS(), OTHER_SETUP),
    engine_under_test("megatron-graphs", GRAPHS(dtype="bfloat16"), GPU),
    engine_under_test("megatron-graphs-experts", GRAPHS(dtype="bfloat16", model="all_experts"), GPU),
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
    engine_under_test(
        "vllm-drafts-small", BY_MODEL(KvPolicy.RECOMPUTE, drafts="model", drafted_by="small"), ENGINE, DRAFTS
    ),
    engine_under_test("vllm-drafts-eagle", BY_MODEL(KvPolicy.KEEP, drafted_by="eagle"), ENGINE, DRAFTS),
    engine_under_test("vllm-drafts-trained", TRAINED, ENGINE, DRAFTS),
    engine_under_test(
        "vllm-drafts-further",
        BY_MODEL(KvPolicy.RECOMPUTE, drafted_by="further", model="further"),
        ENGINE,
        SLOW,
    ),
    engine_under_test(
        "vllm-drafts-eagle3", BY_MODEL(KvPolicy.RECOMPUTE, drafted_by="eagle3", overlaps=False), ENGINE, SLOW
    ),
    engine_under_test(
        "vllm-drafts-small-tp2", BY_MODEL(KvPolicy.RECOMPUTE, ranks=2, drafted_by="small"), ENGINE, SLOW
    ),
    engine_under_test("vllm-lora", Setup("vllm", KvPolicy.RECOMPUTE, lora=LoraConfig(rank=12)), ENGINE, SLOW),
    engine_under_test(
        "vllm-lora-experts",
        Setup("vllm", KvPolicy.KEEP, lora=LoraConfig(rank=3), model="experts"),
        ENGINE,
        SLOW,
    ),
    engine_under_test("vllm-lora-tp2", Setup("vllm", KvPolicy.KEEP, ranks=2, lora=PARTIAL), ENGINE, SLOW),
    engine_under_test("vllm-ep2", divided("vllm", "experts"), ENGINE, SLOW),
    engine_under_test(
        "vllm-ep2-gpus", divided("vllm", "all_experts", "bfloat16", **CACHE), ENGINE, *TWO_GPUS
    ),
    engine_under_test("vllm-shared", Setup("vllm", KvPolicy.RECOMPUTE, shares=True), ENGINE, SLOW),
    engine_under_test("vllm-sleeps", Setup("vllm", KvPolicy.KEEP, sleeps=True, arguments=CACHE), ENGINE, GPU),
    engine_under_test(
        "vllm-lora-sleeps",
        Setup(
            "vllm",
            KvPolicy.RECOMPUTE,
            dtype="float16",
            lora=LoraConfig(rank=8),
            sleeps=True,
            arguments=CACHE,
        ),
        ENGINE,
        GPU,
    ),
    engine_under_test("vllm-graphs", VLLM_GRAPHS(), ENGINE, GPU),
    engine_under_test("vllm-drafts-graphs", VLLM_GRAPHS(drafts="history_always"), ENGINE, GPU),
    engine_under_test(
        "vllm-drafts-eagle-graphs",
        BY_MODEL(
            KvPolicy.KEEP,
            dtype="bfloat16",
            graphs=True,
            drafted_by="eagle",
            margin=SHALLOW,
            arguments=CACHE,
        ),
        ENGINE,
        GPU,
    ),
    engine_under_test(
        "vllm-latent",
        Setup("vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", model="latent"),
        ENGINE,
        slow_unless_changed(*PROCESSED),
    ),
    engine_under_test(
        "vllm-fp8-channels",
        Setup(
            "vllm", KvPolicy.KEEP, dtype="bfloat16", margin=FP8, arguments={"quantization": "fp8_per_channel"}
        ),
        ENGINE,
        slow_unless_changed(*PROCESSED),
    ),
    engine_under_test(
        "vllm-gpt-oss",
        Setup("vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", model="gpt_oss"),
        ENGINE,
        SLOW,
    ),
    engine_under_test(
        "vllm-latent-graphs",
        # what is kept are latent vectors, which new weights expand: transformers keeps old expanded ones
        Setup("vllm", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True, model="latent", arguments=CACHE),
        ENGINE,
        GPU,
    ),
    engine_under_test(
        "vllm-gpt-oss-graphs",
        Setup("vllm", KvPolicy.KEEP, dtype="bfloat16", graphs=True, model="gpt_oss", arguments=CACHE),
        ENGINE,
        GPU,
    ),
    engine_under_test("vllm-fp8", replace(in_fp8("vllm", "dense"), sleeps=True), ENGINE, GPU),
    engine_under_test("vllm-fp8-blocks", in_fp8("vllm", "dense", quantization="fp8_per_block"), ENGINE, GPU),
    engine_under_test("vllm-fp8-experts", in_fp8("vllm", "all_experts"), ENGINE, GPU),
    engine_under_test("vllm-fp8-latent", in_fp8("vllm", "latent"), ENGINE, GPU),
    engine_under_test(
        "vllm-fp8-gpt-oss", in_fp8("vllm", "gpt_oss", moe_backend="triton"), ENGINE, GPU
    ),  # other kernels have another gate than gpt-oss's
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
    engine_under_test("sglang-ep2", divided("sglang", "experts_only"), ENGINE, LONG_START, SLOW),
    engine_under_test(
        "sglang-ep2-gpus", divided("sglang", "experts_only", "bfloat16"), ENGINE, LONG_START, *TWO_GPUS
    ),
    engine_under_test(
        "sglang-jax-recompute", Setup("sglang_jax", KvPolicy.RECOMPUTE), ENGINE, LONG_START, SLOW
    ),
    engine_under_test(
        "sglang-jax-keep", Setup("sglang_jax", KvPolicy.KEEP, dtype="bfloat16"), ENGINE, LONG_START, SLOW
    ),
    engine_under_test(
        "sglang-jax-lora",
        Setup("sglang_jax", KvPolicy.RECOMPUTE, lora=PARTIAL),
        ENGINE,
        LONG_START,
        SLOW,
    ),
    engine_under_test(
        "sglang-latent",
        Setup("sglang", KvPolicy.RECOMPUTE, sleeps=True, model="latent_yarn"),
        ENGINE,
        LONG_START,
        slow_unless_changed(*PROCESSED),
    ),
    engine_under_test("sglang-fp8", in_fp8("sglang", "dense"), ENGINE, LONG_START, GPU),
    engine_under_test("sglang-fp8-experts", in_fp8("sglang", "experts_only"), ENGINE, LONG_START, GPU),
    engine_under_test(
        "sglang-fp8-latent", replace(in_fp8("sglang", "latent"), sleeps=True), ENGINE, LONG_START, GPU
    ),
    engine_under_test(
        "sglang-gpt-oss",
        Setup("sglang", KvPolicy.RECOMPUTE, dtype="bfloat16", graphs=True, model="gpt_oss"),
        ENGINE,
        LONG_START,
        GPU,
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
