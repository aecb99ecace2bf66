"""Finds conflicts with engines: ranks, experts, layers, sglang-jax's families, and missing kernels.

No engine is imported: lists are read from the source of the installed vLLM.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.listed_models import listed_architectures
from rollout.engines.requests import check_fits, head_dim_of
from rollout.engines.sglang.arguments import check_bounded_scores, check_environment
from rollout.engines.sglang_jax.model_check import check_interpreter, check_model
from rollout.engines.vllm.drafts.models import check_draft_model
from services.preflight.model import ModelFacts, engines_of
from services.preflight.problem import Problem, refusals
from services.settings.sections import Settings
from trainer.megatron.families.table import FAMILIES
from trainer.megatron.families.windows import windows_of

SINGLE_RANK_ENGINES = ("hf",)
"""Engines without tensor parallelism."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json with the number of experts, in different model families."""
UNIFORM_IN_VLLM = ("qwen2", "qwen3")
"""Families for which vLLM requires uniform layers; for other families it reads windows per layer."""
RANKS = ("config/lora.py", "MaxLoRARanks")
"""File in vLLM and name in it with the adapter ranks for which vLLM has kernels."""
CPU_HEAD_SIZES = ("v1/attention/backends/cpu_attn.py", "get_supported_head_sizes")
"""File in vLLM and function in it with the head sizes of attention on a CPU."""


def engine_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem for each feature of the model that an engine of the run does not support."""
    for engine in engines_of(settings):
        yield from _rank_problems(engine, model)
        yield from model_refusals(engine.name, model, runs_code=settings.model.trust_remote_code)
        if engine.name == "sglang":
            yield from _sglang_problems(engine, model)
        if engine.name == "vllm" and model.is_made:
            yield from refusals(check_draft_model, engine, model.config, model.place, settings.lora)
        if engine.name == "sglang_jax":
            yield from refusals(check_interpreter, engine.python)
            yield from refusals(check_model, engine, model.config, model.place)
    yield from _recording_problems(settings, model)


def model_refusals(engine: str, model: ModelFacts, *, runs_code: bool = False) -> Iterator[Problem]:
    """Yield a problem for each feature of a model that an engine supports under no settings.

    `runs_code` says whether Python files in the model's directory may define the model.
    """
    if engine == "vllm" and not (model.brings_code and runs_code):
        yield from _unknown_to_vllm(model)
        yield from _windows_in_vllm(model)
    layers = model.config.get("mlp_only_layers")
    if engine == "sglang" and model.config.get("model_type") == "qwen3_moe" and layers:
        yield Problem(  # SGLang expects a router in all layers
            f"{model.place / 'config.json'}: SGLang has no qwen3_moe with layers without experts "
            f"(mlp_only_layers = {layers})",
            "use vllm, hf or megatron",
            "engine.name",
            "sglang",
        )


def engine_refusals(engine: str, model: ModelFacts, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield what the check of a run on this machine refuses of a model for an engine, under any settings.

    `gpus` are the usable GPUs, as for `kernel_problems`.
    """
    yield from model_refusals(engine, model)
    # no model is too short for one token, so that only the model itself is refused
    config = EngineConfig(name=engine, max_model_len=1)
    yield from refusals(check_fits, config, dict(model.config), model.place)
    yield from _missing_kernels(engine, model, gpus)


def _unknown_to_vllm(model: ModelFacts) -> Iterator[Problem]:
    """Compare the architecture with the list in the installed vLLM, which is not imported."""
    names, known = model.config.get("architectures") or [], listed_architectures("vllm")
    if known and model.config.get("model_type") not in FAMILIES and not known & {*names}:
        yield Problem(
            f"{model.place / 'config.json'}: vLLM has no architecture {', '.join(names) or '(unnamed)'}",
            "choose another model, or another engine",
            "engine.name",
            "vllm",
        )


def _windows_in_vllm(model: ModelFacts) -> Iterator[Problem]:
    """Check that all layers have a sliding window or none do, which vLLM would reject only at load time."""
    kind = model.config.get("model_type")
    if kind not in UNIFORM_IN_VLLM:
        return
    family, path = FAMILIES[kind], model.place / "config.json"
    config = {**family.defaults, **model.config}
    layers = int(config.get("num_hidden_layers") or 0)
    try:
        kinds = config.get("layer_types") or windows_of(path, config, family, layers, sys.maxsize)
    except SettingsError:  # the trainer's check reports the cause
        return
    if len(set(kinds)) > 1:
        yield Problem(
            f"{path}: vLLM has no {kind} with a sliding window in some layers and none in others",
            "use megatron or hf; if no sequence is longer than the window, a copy of the model without "
            "layer_types and use_sliding_window is the same model",
            "engine.name",
            "vllm",
        )


def _rank_problems(engine: EngineConfig, model: ModelFacts) -> Iterator[Problem]:
    if engine.name in SINGLE_RANK_ENGINES and engine.tensor_parallel_size != 1:
        yield Problem(
            f"engine {engine.name!r} computes on one rank",
            "set it to 1, or use vllm, sglang or megatron",
            "engine.tensor_parallel_size",
            engine.tensor_parallel_size,
        )


def _sglang_problems(engine: EngineConfig, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem for models that SGLang would reject at its start with a traceback."""
    family, place = model.config.get("model_type"), model.place / "config.json"
    stated = model.config.get("dtype") or model.config.get("torch_dtype")
    if family == "gpt_oss" and stated and stated != engine.dtype:
        yield Problem(
            f"{place}: SGLang makes routers and experts of gpt_oss in the type that it states, {stated}",
            f"set it to {stated}, or state {engine.dtype} there",
            "engine.dtype",
            engine.dtype,
        )


def _recording_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    replays = settings.trainer.routing_replay
    records = replays or any(engine.enable_return_routed_experts for engine in engines_of(settings))
    if records and not any(model.config.get(field) for field in EXPERTS):
        yield Problem(
            f"the model in {model.place} has no experts whose choice could be recorded",
            "remove the setting, or choose a mixture of experts",
            "trainer.routing_replay" if replays else "engine.enable_return_routed_experts",
            True,
        )


def kernel_problems(settings: Settings, model: ModelFacts, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield problems that an engine would report only at its start: missing kernels.

    Kernels may lack a head size, an adapter rank or a dtype.

    Args:
        settings: settings of the run.
        model: model that the engines serve.
        gpus: usable GPUs, as from `services.settings.automatic.visible_gpus`.
    """
    for engine in engines_of(settings):
        if engine.name == "sglang":
            yield from refusals(check_environment, engine)
        if engine.name == "vllm":
            yield from _adapter_rank_problems(settings)
        yield from _missing_kernels(engine.name, model, gpus)
        if gpus:
            yield from _float32_problems(engine, settings.lora.rank)


def _missing_kernels(engine: str, model: ModelFacts, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield features of a model for which an engine has no kernels on this machine."""
    if engine == "sglang" and not gpus:
        yield from refusals(check_bounded_scores, model.config, model.place)
    if engine == "vllm" and not gpus:
        yield from _head_problems(model)


def _adapter_rank_problems(settings: Settings) -> Iterator[Problem]:
    rank, ranks = settings.lora.rank, numbers_in_vllm(*RANKS)
    if ranks and rank > max(ranks):
        yield Problem(
            f"vLLM has kernels for adapters of rank {max(ranks)} at most",
            f"set it to {max(ranks)} or less, or use another engine",
            "lora.rank",
            rank,
        )


def _head_problems(model: ModelFacts) -> Iterator[Problem]:
    size, sizes = head_dim_of(model.config), numbers_in_vllm(*CPU_HEAD_SIZES)
    if size and sizes and size not in sizes:
        yield Problem(
            f"{model.place / 'config.json'}: head_dim {size} is not supported by vLLM on a CPU, and torch "
            f"sees no GPU here; supported are {', '.join(map(str, sizes))}",
            "use hf, megatron or sglang, or another model",
            "engine.name",
            "vllm",
        )


def _float32_problems(engine: EngineConfig, rank: int) -> Iterator[Problem]:
    if engine.dtype != "float32":
        return
    causes = {
        "vllm": "vLLM's adapter kernels on a GPU compute in bfloat16 and float16" if rank else "",
        "sglang": "SGLang's kernels on a GPU compute in bfloat16 and float16",
    }
    if cause := causes.get(engine.name):
        yield Problem(cause, "use bfloat16", "engine.dtype", "float32")


def numbers_in_vllm(file: str, name: str) -> list[int]:
    """Return the numbers in the definition of a name or function in the installed vLLM; none without it.

    Args:
        file: path inside the package.
        name: name of an assignment, or of a function at any depth.
    """
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    for path in (Path(place) / file for place in places or ()):
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, "name", "")] + [getattr(t, "id", "") for t in getattr(node, "targets", ())]
            if name in names:
                return [
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and type(part.value) is int
                ]
    return []
