"""Creates engines by name.

An engine's module is imported only when it is chosen, so that the other engines' libraries are not needed.
"""

import importlib
from pathlib import Path
from typing import Any

from protocol.choices import checked_name
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
"""Engine -> its class.

The `__init__` of the packages `vllm` and `sglang` stays empty, because their worker and plug-in modules must
be the first of our modules that vLLM and SGLang import.
"""
SERVE_ADAPTERS = ("hf", "sglang", "vllm")
"""Engines that support `[lora]`."""
CAN_SLEEP = ("hf", "megatron", "sglang", "vllm")
"""Engines that support sleep, and with it `[colocated]`."""
STARTED_TO_SLEEP = ("sglang", "vllm")
"""Engines that can sleep only if `enable_sleep_mode` is set when they start, vLLM only on a GPU."""
RECORD_EXPERTS = ("hf", "megatron", "sglang", "vllm")
"""Engines that record the experts that a model chose, for `trainer.routing_replay`; vLLM only on a GPU."""
CAN_SHARE = {"hf": "reference", "megatron": "megatron", "vllm": "reference"}
"""Engine -> the trainer's backend that can compute with its live weights."""


def import_engine(config: EngineConfig) -> None:
    """Import an engine's class, and what that says itself that it will need, before it is made.

    Raises:
        ImportError: its library is not installed, or is broken.
    """
    module_name, class_name = ENGINES[checked_name(config.name, ENGINES, "engine")].rsplit(".", 1)
    getattr(importlib.import_module(module_name), class_name).preload(config)


def make_engine(
    config: EngineConfig,
    model_dir: Path,
    incarnation: str,
    lora: LoraConfig = NO_ADAPTERS,
    *,
    shared: Path | None = None,
) -> Engine:
    """Create the engine named `config.name`, not started.

    Args:
        config: the engine's settings.
        model_dir: directory of the model's config and, if it has any, weights.
        incarnation: name of this engine, in errors and logs.
        lora: the adapter that versions bring, if any.
        shared: file by which the trainer finds the live weights, to compute with them; only for engines in
            `CAN_SHARE`. None: it does not.

    Raises:
        SettingsError: if there is no engine of that name, its library is not installed, or it should serve
            adapters and cannot.
    """
    module_name, class_name = ENGINES[checked_name(config.name, ENGINES, "engine")].rsplit(".", 1)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(f"engine {config.name!r} cannot be imported: {error}") from error
    if lora.rank and config.name not in SERVE_ADAPTERS:
        raise SettingsError(
            f"setting lora.rank: engine {config.name!r} does not serve adapters; "
            f"use one of {', '.join(SERVE_ADAPTERS)}"
        )
    options: dict[str, Any] = {"lora": lora} if lora.rank else {}
    if shared is not None:
        options["shared"] = shared
    engine: Engine = getattr(module, class_name)(config, model_dir, incarnation, **options)
    return engine
