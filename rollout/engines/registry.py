"""Engines by name. An engine's module is imported when it is chosen, so that nobody needs the libraries of the others."""

import difflib
import importlib
from pathlib import Path

from protocol.errors import SettingsError
from rollout.engines.base import Engine, EngineConfig

ENGINES: dict[str, str] = {"hf": "HFEngine", "scripted": "ScriptedEngine", "sglang": "SglangEngine", "vllm": "VllmEngine"}
"""Module in `rollout/engines/` -> its class."""


def make_engine(config: EngineConfig, model_dir: Path, incarnation: str) -> Engine:
    """The engine that `config.name` says, not started yet.

    Raises:
        SettingsError: if there is none of that name, or its library is not installed.
    """
    if config.name not in ENGINES:
        close = difflib.get_close_matches(config.name, ENGINES, n=1, cutoff=0.0)
        raise SettingsError(f"engine {config.name!r} is not known; there are {', '.join(sorted(ENGINES))}. Did you mean {close[0]}?")
    try:
        module = importlib.import_module(f"rollout.engines.{config.name}")
    except ImportError as error:
        raise SettingsError(f"engine {config.name!r} cannot be imported: {error}") from error
    found: Engine = getattr(module, ENGINES[config.name])(config, model_dir, incarnation)
    return found
