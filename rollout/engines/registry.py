"""Creates engines by name, or one of the user by `MODULE:NAME`.

    class Mine(Engine):
        def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str): ...

`[engine] options` are in `config.options`. docs/own_code.md describes it. An engine's module is imported only
when the engine is chosen, so that one engine's library suffices.
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
    """Class of an engine, and its capabilities."""

    serves_adapters: bool = False
    """Whether it supports `[lora]`."""
    names_adapters: bool = False
    """Whether it serves several adapters by name, for `tether serve --adapter`."""
    can_sleep: bool = False
    """Whether it supports sleep, and with it `[colocated]`."""
    started_to_sleep: bool = False
    """Whether it can sleep only if `enable_sleep_mode` is set when it starts; vLLM only on a GPU."""
    records_experts: bool = False
    """Whether it records the experts that a model chose, for `trainer.routing_replay`; vLLM only on a GPU."""
    profiles: bool = False
    """Whether torch.profiler can watch its ranks, for `engine.profile_versions`."""
    drafts: bool = False
    """Whether it verifies drafts, for `engine.drafts`."""
    batch_invariant: bool = False
    """Whether it has `engine.batch_invariant`, and seeds of single requests."""
    places: bool = False
    """Whether it stages where `engine.staging` says; others stage on the device."""
    arguments: str = ""
    """Module with the table of arguments that are refused in `[engine.arguments]`; empty: it takes none."""
    shares_with: tuple[str, ...] = ()
    """The trainer's backends that can compute with the engine's live weights."""
    shares_base: bool = False
    """Whether it can do so under `[lora]`, too: adapters are apart from the model's own weights."""


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
"""The engines. One of the user has no capability of an entry.

The `__init__` of the packages `vllm` and `sglang` stays empty, because their worker and plug-in modules must
be the first of our modules that vLLM and SGLang import.
"""


def import_engine(config: EngineConfig) -> Callable[[], None] | None:
    """Import an engine's class, and the modules that the class names, before the engine is made.

    Returns:
        What a fork of this process, which will have the engine, has to do first; None: nothing.

    Raises:
        ImportError: its library is not installed, or is broken.
        SettingsError: it is not known, or is the user's and cannot be loaded.
    """
    return engine_class(config.name).preload(config)


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine called `name`.

    Raises:
        ImportError: its library is not installed, or is broken.
        SettingsError: it is not known; or is the user's, and cannot be loaded or is no complete `Engine`.
    """
    entry = ENGINES.find(name, "engine")
    if not is_own(name):
        known: type[Engine] = load(entry.path)
        return known
    item, file = import_attribute(name, "setting engine.name")
    if not (isinstance(item, type) and issubclass(item, Engine)):
        raise SettingsError(
            f"setting engine.name: {name} in {file} is no subclass of rollout.engines.base.Engine"
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
    """Create the engine named `config.name`, not started.

    Args:
        config: the engine's settings.
        model_dir: directory of the model's config and, if it has any, weights.
        incarnation: name of this engine, in errors and logs.
        lora: the adapter that versions bring, if any.
        shared: file by which the trainer finds the live weights, to compute with them; only for engines with
            `shares_with`, with `lora` for those with `shares_base`. None: the trainer has its own.
        named: name -> PEFT directory of the adapters that requests may name; only for engines with
            `names_adapters`, and without `lora` and `shared`.

    Raises:
        SettingsError: if there is no engine of that name, its library is not installed, or it should serve
            adapters and cannot.
    """
    entry = ENGINES.find(config.name, "engine")
    try:
        made: Any = engine_class(config.name)
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
    engine: Engine = made(config, model_dir, incarnation, **options)
    return engine
