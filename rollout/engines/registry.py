"""Engines by name. An engine's module is imported when it is chosen, so that nobody needs the libraries of
the others."""

import difflib
import importlib
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import Engine, EngineConfig

ENGINES: dict[str, str] = {
    "hf": "rollout.engines.hf.engine.HFEngine",
    "megatron": "rollout.engines.megatron.engine.MegatronEngine",
    "scripted": "rollout.engines.scripted.ScriptedEngine",
    "sglang": "rollout.engines.sglang.engine.SglangEngine",
    "vllm": "rollout.engines.vllm.engine.VllmEngine",
}
"""Engine -> its class. The packages `vllm` and `sglang` keep an empty `__init__`: their plug-in modules are
the first of ours that vLLM and SGLang import."""
SERVE_ADAPTERS = ("hf", "sglang", "vllm")
CAN_SLEEP = ("hf", "megatron", "sglang", "vllm")
STARTED_TO_SLEEP = ("sglang", "vllm")
"""Can only if `enable_sleep_mode` is set, vLLM on a GPU alone."""
CAN_SHARE = {"hf": "reference", "megatron": "megatron", "vllm": "reference"}
"""Engine -> the trainer's backend that can compute with its live weights."""


def make_engine(
    config: EngineConfig,
    model_dir: Path,
    incarnation: str,
    lora: LoraConfig = NO_ADAPTERS,
    *,
    shared: Path | None = None,
) -> Engine:
    """The engine that `config.name` says, not started yet.

    Args:
        shared: of an engine that can share: the trainer computes with its live weights, and finds them by
            this file.

    Raises:
        SettingsError: if there is none of that name, its library is not installed, or it is to serve
            adapters and cannot.
    """
    if config.name not in ENGINES:
        close = difflib.get_close_matches(config.name, ENGINES, n=1, cutoff=0.0)
        raise SettingsError(
            f"engine {config.name!r} is not known; there are {', '.join(sorted(ENGINES))}. Did you mean {close[0]}?"
        )
    module_name, class_name = ENGINES[config.name].rsplit(".", 1)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(f"engine {config.name!r} cannot be imported: {error}") from error
    if lora.rank and config.name not in SERVE_ADAPTERS:
        raise SettingsError(
            f"setting lora.rank: engine {config.name!r} does not serve adapters; use one of {', '.join(SERVE_ADAPTERS)}"
        )
    options: dict[str, Any] = {"lora": lora} if lora.rank else {}
    if shared is not None:
        options["shared"] = shared
    found: Engine = getattr(module, class_name)(config, model_dir, incarnation, **options)
    return found
