"""Finds what an engine refuses: ranks, experts to record, layers without experts, sglang-jax's families."""

from collections.abc import Iterator

from rollout.engines.base import EngineConfig
from rollout.engines.sglang_jax.interpreter import check_interpreter
from rollout.engines.sglang_jax.model_check import check_model
from services.preflight.model import ModelFacts, engines_of
from services.preflight.problem import Problem, refusals
from services.settings.sections import Settings

ON_ONE_RANK = ("hf", "megatron")
"""Engines without tensor parallelism."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json, by family, with the number of experts."""


def engine_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield what the engines of a run cannot do with the model."""
    for engine in engines_of(settings):
        yield from _rank_problems(engine)
        yield from _dense_layer_problems(engine, model)
        if engine.name == "sglang_jax":
            yield from refusals(check_interpreter, engine.python)
            yield from refusals(check_model, engine, model.config, model.place)
    yield from _recording_problems(settings, model)


def _rank_problems(engine: EngineConfig) -> Iterator[Problem]:
    if engine.name in ON_ONE_RANK and engine.tensor_parallel_size != 1:
        yield Problem(
            f"engine {engine.name!r} computes on one rank",
            "set it to 1, or use vllm or sglang",
            "engine.tensor_parallel_size",
            engine.tensor_parallel_size,
        )


def _dense_layer_problems(engine: EngineConfig, model: ModelFacts) -> Iterator[Problem]:
    """Refuse layers without experts in a family whose SGLang model asks every layer for its router."""
    layers = model.config.get("mlp_only_layers")
    if engine.name == "sglang" and model.config.get("model_type") == "qwen3_moe" and layers:
        yield Problem(
            f"{model.place / 'config.json'}: SGLang has no qwen3_moe with layers without experts "
            f"(mlp_only_layers = {layers})",
            "use vllm, hf or megatron",
            "engine.name",
            "sglang",
        )


def _recording_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    replays = settings.trainer.routing_replay
    records = replays or any(engine.enable_return_routed_experts for engine in engines_of(settings))
    if records and not any(model.config.get(field) for field in EXPERTS):
        yield Problem(
            f"the model in {model.place} has no experts whose choice could be recorded",
            "leave it out, or choose a mixture of experts",
            "trainer.routing_replay" if replays else "engine.enable_return_routed_experts",
            True,
        )
