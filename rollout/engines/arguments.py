"""Checks `[engine.arguments]`, which are passed to the engine's own library.

Each engine that accepts arguments has a module with a table of refused arguments. The module does not import
the engine: argument names are parsed from the source of the installed library.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from protocol.choices import checked_name, load
from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES

# reasons shared by several engines
MODEL = "the engine serves the model that is trained: set it in [model]"
OTHER_MODEL = "the engine would compute another model than the trainer"
FILES = (
    "the weights that the start compares with the parameters, and that adapters rest on, are the model's "
    "safetensors; without any, they come with the first version"
)
SAMPLED = "tokens would be drawn from another distribution than the one that the trainer computes"
ADAPTER = "[lora] sets it: one adapter, which versions replace in its slot"
RANKS = (
    "an engine's GPUs, ranks and threads are counted by engine.tensor_parallel_size alone; raise that, or "
    "start more rollout workers (services.rollouts)"
)
MOVED = (
    "experts would move between ranks while the engine serves, away from where versions are copied to by the "
    "plan of its start"
)
OFFLOADED = "offloaded parameters are not updated"
OTHER_KV = "this KV cache is not invalidated by updates"
OTHER_UPDATES = "weights change only by a commit of the run's own version"


def check_arguments(config: EngineConfig, setting: str) -> None:
    """Check that the engine accepts arguments, and that none of them is refused.

    Args:
        config: engine settings; unknown engine names are ignored here.
        setting: dotted name of the arguments, for errors.

    Raises:
        SettingsError: an argument is refused; the message names it and the reason.
    """
    module = _module_of(config, setting)
    refused: Mapping[str, str] = module.REFUSED if module else {}
    for name in config.arguments:
        if name in refused:
            raise SettingsError(f"setting {setting}.{name}: refused, because {refused[name]}")


def check_known(config: EngineConfig, setting: str) -> None:
    """Check the argument names against the installed engine's; skipped if the engine is not installed.

    Raises:
        SettingsError: an argument is unknown; the message suggests a similar one.
    """
    module = _module_of(config, setting)
    if module and (known := module.argument_names(config)):
        for name in config.arguments:
            checked_name(name, known, f"setting {setting}: argument of {config.name}")


def annotated_fields(paths: Iterable[Path], classes: Iterable[str] = ()) -> list[str]:
    """Return the public annotated fields of classes in source files, in order; missing files are skipped.

    Args:
        paths: Python files.
        classes: names of the classes to read; empty: all.
    """
    wanted = set(classes)
    return [
        field.target.id
        for path in paths
        if path.is_file()
        for definition in ast.parse(path.read_text()).body
        if isinstance(definition, ast.ClassDef) and (not wanted or definition.name in wanted)
        for field in definition.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    ]


def _module_of(config: EngineConfig, setting: str) -> ModuleType | None:
    """Return the module with the engine's table; None if no arguments are set."""
    if not config.arguments or config.name not in ENGINES:
        return None
    path = ENGINES[config.name].arguments
    if not path:
        raise SettingsError(
            f"setting {setting}: engine {config.name!r} takes no arguments; remove them, or use "
            f"{' or '.join(ENGINES.having('arguments'))}"
        )
    module: ModuleType = load(path)
    return module
