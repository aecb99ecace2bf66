"""Finds settings that conflict with a model: layouts, lengths, backends, engines.

Reads files and builds no model.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from protocol.device.checkpoint_shapes import count_parameters, tensor_shapes
from protocol.errors import EngineError, SettingsError
from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_targets
from protocol.weights.peft import check_peft
from rollout.engines.arguments import check_known
from rollout.engines.base import EngineConfig
from rollout.engines.requests import check_adapters, check_fits
from services.preflight.problem import Problem, refusals
from services.settings.evaluation import eval_engine
from services.settings.hub import fetch_model
from services.settings.sections import Settings
from trainer.config import ParallelConfig
from trainer.fsdp.layout import (
    NOT_SHARDED,
    OTHER_LAYERS,
    TENSOR_SIZE,
    adapter_refusal,
    division_refusal,
    layout_refusals,
    plan_of,
    tensor_rank_refusals,
)
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.reshard import TensorPlan, first_interleaved
from trainer.megatron.families.config_file import read_config
from trainer.megatron.families.delta import check_generation
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import architecture_of, as_critic
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.families.table import FAMILIES
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import frozen_layout
from trainer.random_model import check_scratch, config_of, shapes_of
from trainer.roles.config import REWARD_MODEL

VLLM_PADS_TO = 64
"""vLLM pads the vocabulary of all ranks together to a multiple of this number of rows."""
TRANSFORMERS_BACKENDS = ("fsdp", "reference")
"""Backends that train transformers models unchanged."""

ROUTERS = ("gate", "router")
"""Last components of the names of router layers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model before it is loaded."""

    place: Path
    """Directory of the model, or the directory in which it will be created."""
    config: Mapping[str, Any]
    """config.json, or its relevant part."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape of each tensor; empty if unknown."""
    is_made: bool
    """Whether the directory exists."""

    @property
    def parameters(self) -> int:
        """Number of parameters; 0 if unknown."""
        return count_parameters(self.shapes)

    @property
    def brings_code(self) -> bool:
        """Whether a Python file in the directory defines the model."""
        return "AutoModelForCausalLM" in (self.config.get("auto_map") or {})

    @property
    def vocabulary(self) -> int:
        return int(self.config.get("vocab_size") or 0)


def read_model(settings: Settings) -> ModelFacts:
    """Return the facts of a run's initial model.

    Raises:
        SettingsError: there is no model, or [model.scratch] is invalid.
    """
    place, scratch = settings.model_dir, settings.model.scratch
    if scratch is not None:
        check_scratch(scratch, place)
        if not place.exists():
            config = config_of(scratch)
            return ModelFacts(place, config, dict(shapes_of(scratch)), is_made=False)
    return read_facts(fetch_model(settings))


def read_facts(place: Path) -> ModelFacts:
    """Return the facts of the model in a directory.

    Raises:
        SettingsError: the model's files cannot be read.
    """
    return ModelFacts(place, read_config(place), tensor_shapes(place), is_made=True)


def model_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem for each feature of the model that the trainer or an engine does not support."""
    yield from _trainer_problems(settings, model)
    for engine in engines_of(settings):
        yield from _engine_problems(settings, engine, model)


def adapter_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield reasons why the model cannot have the adapters of `[lora]`, or start from `lora.path`."""
    lora = settings.lora
    if not (lora.rank and model.shapes):  # missing weights are reported elsewhere
        return
    problems = [*refusals(lambda: check_peft(adapter_targets(model.shapes, lora), lora))]
    backends = {settings.trainer.backend, *(engine.name for engine in engines_of(settings))}
    if "megatron" in backends and not problems:
        problems += refusals(_check_megatron_adapters, settings, model)
    elif not problems and any(".experts." in name for name in model.shapes):
        problems += _expert_problems(adapter_targets(model.shapes, lora), lora)
    if settings.trainer.backend == "fsdp" and not problems:
        ranks = settings.parallel.tensor_model_parallel_size
        modules = [target.module for target in adapter_targets(model.shapes, lora)]
        plan = plan_of(model.config) if ranks > 1 else {}
        if cause := adapter_refusal(plan, modules, ranks):
            yield Problem(cause, OTHER_LAYERS, "lora.target_modules", list(lora.target_modules))
    yield from problems


def _check_megatron_adapters(settings: Settings, model: ModelFacts) -> None:
    """Build the adapters' rules as trainer and engine do. Raises SettingsError."""
    is_trainer = settings.trainer.backend == "megatron"
    try:
        architecture = architecture_of(dict(model.config), model.place / "config.json")
        parallel = settings.parallel if is_trainer else ParallelConfig()
        layout = Layout.of(parallel, architecture.layers)
        stages = [stage_rules(architecture, layout, stage) for stage in range(layout.pp)]
    except SettingsError:  # reported by the model's check
        return
    for rules in stages:
        lora_rules(rules, settings.lora)


def _expert_problems(targets: Iterable[AdapterTarget], lora: LoraConfig) -> Iterator[Problem]:
    """Yield the first target that cannot have adapters: experts are stacked, and routers return tuples."""
    chosen = (t.weight for t in targets if "experts" in t.module.split(".") or t.last in ROUTERS)
    for weight in islice(chosen, 1):
        yield Problem(
            f"{weight} is an expert's or a router's, which cannot have adapters",
            "name projections of attention, or use 'all-linear'",
            "lora.target_modules",
            list(lora.target_modules),
        )


def describe_adapters(settings: Settings, model: ModelFacts) -> str:
    """Describe the layers with adapters; empty without adapters."""
    lora = settings.lora
    if not (lora.rank and model.shapes):
        return ""
    names = sorted({target.last for target in adapter_targets(model.shapes, lora)})
    return f"; adapters of rank {lora.rank} on {', '.join(names)}"


def frozen_problems(settings: Settings, role: str, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem for each feature of a frozen model that the trainer does not support."""
    setting, backend = f"{role}.path", settings.trainer.backend
    if backend == "scripted":
        yield Problem("trainer.backend 'scripted' has no models", "use megatron or fsdp", setting, role)
    if backend in TRANSFORMERS_BACKENDS:
        yield from _unknown_to_transformers(settings, setting, str(model.place), model)
    apart = role in settings.placement.ranks
    section = f"placement.{role}" if apart else "section [parallel]"
    if backend == "fsdp":
        parallel = settings.placement.layout(role) if apart else settings.parallel
        if cause := _undivided(model, parallel):
            yield Problem(f"{section} with {model.place}: {cause}", "", setting, str(model.place))
    if backend == "megatron":
        parallel = settings.placement.layout(role) if apart else frozen_layout(settings.parallel)
        try:
            architecture = architecture_of(dict(model.config), model.place / "config.json")
            architecture = as_critic(architecture) if role == REWARD_MODEL else architecture
            if architecture.experts.count:
                check_ranks(architecture.experts, parallel)
            export_plan(architecture, Layout.of(parallel, architecture.layers))
        except SettingsError as error:
            yield Problem(f"{section} with {model.place}: {error}", "", setting, str(model.place))
    if model.is_made and not any(model.place.glob("*.safetensors")):
        yield Problem(f"the trainer needs weights, and {model.place} holds no *.safetensors")


def _trainer_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    backend, parallel = settings.trainer.backend, settings.parallel
    if backend == "fsdp":
        yield from _division_problems(settings, model)
    elif backend != "megatron" and parallel.world_size != 1:
        yield Problem(
            f"it runs on one rank, and [parallel] asks for {parallel.world_size}",
            "use megatron or fsdp, or set the sizes in [parallel] to 1",
            "trainer.backend",
            backend,
        )
    if backend in TRANSFORMERS_BACKENDS:
        yield from _unknown_to_transformers(settings, "trainer.backend", backend, model)
    if backend == "megatron":
        yield from _megatron_problems("trainer.backend", settings, model)
    read = ("*.safetensors", "pytorch_model*.bin") if backend in TRANSFORMERS_BACKENDS else ("*.safetensors",)
    if model.is_made and backend != "scripted" and not any(chain(*map(model.place.glob, read))):
        yield Problem(f"the trainer needs weights, and {model.place} holds no {' or '.join(read)}")


def _division_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    parallel, ranks = settings.parallel, settings.parallel.tensor_model_parallel_size
    for setting, value in layout_refusals(parallel):
        yield Problem(NOT_SHARDED, "remove the setting, or use megatron", setting, value)
    for cause, remedy in tensor_rank_refusals(parallel, settings.trainer):
        yield Problem(cause, remedy, TENSOR_SIZE, ranks)
    if cause := _undivided(model, parallel):
        yield Problem(cause, "choose another number, or use megatron", TENSOR_SIZE, ranks)


def _undivided(model: ModelFacts, parallel: ParallelConfig) -> str:
    """Return why tensor-parallel ranks of `fsdp` cannot divide a model; empty if they can."""
    ranks = parallel.tensor_model_parallel_size
    plan = plan_of(model.config) if ranks > 1 else {}
    return division_refusal(plan, model.config.get("text_config") or model.config, ranks)


def _megatron_problems(setting: str, settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    parallel = settings.parallel if setting == "trainer.backend" else ParallelConfig()
    tp = parallel.tensor_model_parallel_size
    try:
        architecture = architecture_of(dict(model.config), model.place / "config.json")
    except SettingsError as error:
        other = "use fsdp" if setting == "trainer.backend" else "choose another one"
        yield Problem(str(error), f"{other}, or another model", setting, "megatron")
        return
    if architecture.heads % tp:
        yield Problem(
            f"it does not divide the model's {architecture.heads} attention heads",
            "choose a divisor",
            "parallel.tensor_model_parallel_size",
            tp,
        )
        return
    if setting == "trainer.backend":
        yield from _longrope_problems(settings, architecture)
    else:
        yield from refusals(check_generation, architecture.delta)
    try:
        check_ranks(architecture.experts, parallel)
        plan = export_plan(architecture, Layout.of(parallel, architecture.layers))
    except SettingsError as error:
        yield Problem(f"section [parallel]: {error}")
        return
    if setting == "trainer.backend" and settings.shares_masters:
        yield from _shared_problems(settings, architecture, first_interleaved(plan))


def _shared_problems(
    settings: Settings, architecture: Architecture, turns: TensorPlan | None
) -> Iterator[Problem]:
    kind, engine, size = architecture.model_type, settings.engine.name, architecture.vocabulary
    is_apart = settings.engine.tensor_parallel_size > 1 and engine == "vllm"
    conflicts = {
        f"the trainer interleaves q, k and v, and {kind} stores them concatenated": (
            architecture.family.fused_qkv
        ),
        f"it publishes masters, and the biases of the routers of {kind} have none": architecture.experts.bias,
        f"engines use parts of the trainer's tensors, and {kind} has the experts' matrices transposed": (
            architecture.experts.biases
        ),
        f"{turns and turns.name} is interleaved with other tensors in the trainer's "
        f"{turns and turns.parameter}, and is not in engine {engine!r}; with one key-value head on each rank "
        f"it would not be, and {kind} here has {architecture.kv_heads}": turns is not None
        and engine != "megatron",
        f"vLLM pads a vocabulary of {size} tokens to a multiple of {VLLM_PADS_TO} before it divides it, and "
        "the trainer does not": is_apart and size % VLLM_PADS_TO > 0,
        f"vLLM computes the latent attention of {kind} with tensors that it makes after loading, which no "
        "commit from masters would change": architecture.latent is not None and engine == "vllm",
    }
    for problem, present in conflicts.items():
        if present:
            yield Problem(problem, "use shm", "weights.transport", "shared")


def _longrope_problems(settings: Settings, architecture: Architecture) -> Iterator[Problem]:
    """Compare the context with the limit up to which engines and trainer rotate alike."""
    originals = [rope.original_max_position_embeddings for rope in architecture.ropes if rope.long_factor]
    longest = max(engine.max_model_len for engine in engines_of(settings))
    if originals and longest > min(originals):
        yield Problem(
            f"longrope rotates otherwise beyond {min(originals)} tokens: an engine decides it by this limit, "
            "the trainer by the length of each sequence",
            f"set it to {min(originals)} or less",
            "engine.max_model_len",
            longest,
        )


def _engine_problems(settings: Settings, engine: EngineConfig, model: ModelFacts) -> Iterator[Problem]:
    if engine.name == "scripted":
        return
    yield from refusals(check_known, engine, "engine.arguments")
    try:
        check_fits(engine, dict(model.config), model.place)
        if model.is_made:
            check_adapters(settings.lora, model.place)
    except EngineError as error:
        yield Problem(f"section [engine]: {error}", "change that setting, or choose another model")
    if engine.name == "megatron":
        yield from _megatron_problems("engine.name", settings, model)
    if engine.name == "hf":
        yield from _unknown_to_transformers(settings, "engine.name", "hf", model)


def engines_of(settings: Settings) -> list[EngineConfig]:
    """Return the settings of each kind of engine that generates for the run."""
    pool = settings.services.pool
    engines = [dataclasses.replace(settings.engine, **entry.engine) for entry in pool] or [settings.engine]
    return [*engines, eval_engine(settings)] if settings.eval.every else engines


def _unknown_to_transformers(
    settings: Settings, setting: str, value: str, model: ModelFacts
) -> Iterator[Problem]:
    kind = model.config.get("model_type")
    if kind in FAMILIES or (model.brings_code and settings.model.trust_remote_code):
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # imports torch

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield Problem(
            f"{model.place / 'config.json'}: model_type {kind!r} is not a causal language model that "
            "transformers has",
            "read the Python files that the model brings, and set model.trust_remote_code to run them"
            if model.brings_code
            else "choose another model",
            setting,
            value,
        )
