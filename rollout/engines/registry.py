"""Creates engines: built-in ones by name, a user's by `MODULE:NAME`.

    class Mine(Engine):
        def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str): ...

`[engine] options` are in `config.options`, see docs/own_code.md. An engine's module is imported only when the
engine is selected, so only the selected engine's library must be installed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.choices import Entry, Registry, is_own, load
from protocol.errors import SettingsError
from protocol.user_code import import_attribute
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import Engine, EngineConfig


@dataclass(frozen=True, slots=True)
class EngineEntry(Entry):
    """Class and capabilities of an engine."""

    serves_adapters: bool = False
    """Whether the engine supports `[lora]`."""
    names_adapters: bool = False
    """Whether the engine serves several adapters by name, for `tether serve --adapter`."""
    can_sleep: bool = False
    """Whether the engine supports sleep, and therefore `[colocated]`."""
    started_to_sleep: bool = False
    """Whether sleep requires `enable_sleep_mode` at the start; vLLM: only on GPU."""
    records_experts: bool = False
    """Whether the engine records routed experts, for `trainer.routing_replay`; vLLM: only on GPU."""
    profiles: bool = False
    """Whether torch.profiler can profile the engine's ranks, for `engine.profile_versions`."""
    drafts: bool = False
    """Whether the engine verifies drafts, for `engine.drafts`."""
    batch_invariant: bool = False
    """Whether the engine supports `engine.batch_invariant`, and per-request seeds."""
    places: bool = False
    """Whether the engine supports `engine.staging`; other engines stage on the device."""
    arguments: str = ""
    """Module with the table of refused `[engine.arguments]`; empty: the engine accepts no arguments."""
    shares_with: tuple[str, ...] = ()
    """Trainer backends that can compute with the engine's live weights."""
    shares_base: bool = False
    """Whether sharing also works with `[lora]`, because adapters are separate from the base weights."""


ENGINES = Registry(
    {
        "hf": EngineEntry(
            "rollout.engines.hf.engine:HFEngine",
            serves_adapters=True,
            names_adapters=True,
            can_sleep=True,
            records_experts=True,
            batch_invariant=True,
            profiles=True,
            places=True,
            shares_with=("reference",),
        ),
        "megatron": EngineEntry(
            "rollout.engines.megatron.engine:MegatronEngine",
            serves_adapters=True,
            names_adapters=True,
            can_sleep=True,
            records_experts=True,
            profiles=True,
            places=True,
            shares_with=("megatron",),
            shares_base=True,
        ),
        "scripted": EngineEntry("rollout.engines.scripted:ScriptedEngine"),
        "sglang": EngineEntry(
            "rollout.engines.sglang.engine:SglangEngine",
            serves_adapters=True,
            names_adapters=True,
            can_sleep=True,
            started_to_sleep=True,
            records_experts=True,
            profiles=True,
            places=True,
            arguments="rollout.engines.sglang.arguments",
        ),
        "sglang_jax": EngineEntry(
            "rollout.engines.sglang_jax.engine:SglangJaxEngine", serves_adapters=True, can_sleep=True
        ),
        "vllm": EngineEntry(
            "rollout.engines.vllm.engine:VllmEngine",
            serves_adapters=True,
            names_adapters=True,
            can_sleep=True,
            started_to_sleep=True,
            records_experts=True,
            profiles=True,
            drafts=True,
            batch_invariant=True,
            places=True,
            arguments="rollout.engines.vllm.arguments",
            shares_with=("reference", "megatron"),
        ),
    },
    own=EngineEntry,
)
"""Registered engines. A user's engine has no capabilities.

`__init__.py` of the packages `vllm` and `sglang` stays empty, because their worker and plug-in modules must
be the first modules of this project that vLLM and SGLang import."""


def import_engine(config: EngineConfig) -> Callable[[], None] | None:
    """Import an engine's class and the modules that it needs, before the engine is created.

    Returns:
        A function that a fork of this process must call before it starts the engine, or None.

    Raises:
        ImportError: the engine's library is missing or broken.
        SettingsError: the engine is unknown, or a user's engine cannot be loaded.
    """
    return engine_class(config.name).preload(config)


def engine_class(name: str) -> type[Engine]:
    """Return the engine class for `name`.

    Raises:
        ImportError: the engine's library is missing or broken.
        SettingsError: the engine is unknown, or a user's engine cannot be loaded or is not a complete
            `Engine`.
    """
    entry = ENGINES.find(name, "engine")
    if not is_own(name):
        known: type[Engine] = load(entry.path)
        return known
    item, file = import_attribute(name, "setting engine.name")
    if not (isinstance(item, type) and issubclass(item, Engine)):
        raise SettingsError(
            f"setting engine.name: {name} in {file} is not a subclass of rollout.engines.base.Engine"
        )
    if missing := sorted(item.__abstractmethods__):
        raise SettingsError(f"setting engine.name: {name} in {file} lacks {', '.join(missing)}")
    return item


def make_engine(
    config: EngineConfig,
    model_dir: Path,
    incarnation: str,
    lora: LoraConfig = NO_ADAPTERS,
    *,
    shared: Path | None = None,
    named: Mapping[str, Path] | None = None,
) -> Engine:
    """Create the engine `config.name`, not started.

    Args:
        model_dir: directory of the model's config and, optionally, weights.
        incarnation: name of this engine in errors and logs.
        lora: adapter that versions contain, if any.
        shared: file through which the trainer finds the live weights, to compute with them. Requires
            `shares_with`, and with `lora` also `shares_base`. None: the trainer has its own weights.
        named: name -> PEFT directory of adapters that requests may name. Requires `names_adapters`; excludes
            `lora` and `shared`.

    Raises:
        SettingsError: the engine is unknown, its library is not installed, or it does not support adapters.
    """
    entry = ENGINES.find(config.name, "engine")
    try:
        engine_type: Any = engine_class(config.name)
    except ImportError as error:
        raise SettingsError(f"engine {config.name!r} cannot be imported: {error}") from error
    if lora.rank and not entry.serves_adapters:
        raise SettingsError(
            f"setting lora.rank: engine {config.name!r} does not serve adapters; "
            f"use one of {', '.join(ENGINES.having('serves_adapters'))}"
        )
    if named and not entry.names_adapters:
        raise SettingsError(
            f"setting engine.name: engine {config.name!r} does not serve adapters by name; "
            f"use one of {', '.join(ENGINES.having('names_adapters'))}"
        )
    options: dict[str, Any] = {"lora": lora} if lora.rank else {}
    if named:
        options["named"] = named
    if shared is not None:
        options["shared"] = shared
    engine: Engine = engine_type(config, model_dir, incarnation, **options)
    return engine
