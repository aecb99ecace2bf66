"""Refuses models that sglang-jax 0.0.2 lacks or computes incorrectly, and sizes the KV cache."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from protocol.errors import EngineSettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.requests import check_fits, kv_bytes

PACKAGES = ("sglang-jax", "jax", "flax", "msgspec", "numpy", "xxhash")
FIND = f"""
from importlib.metadata import version
for name in {PACKAGES}:
    version(name)
"""
FIND_S = 30.0


@cache
def check_interpreter(python: str) -> None:
    """Check that the interpreter `engine.python` can run the engine's model process.

    Args:
        python: value of the setting; empty: this interpreter.

    Raises:
        EngineSettingsError: the interpreter lacks a package; the message names it and the lock file to
            install.
    """
    try:
        found = subprocess.run(
            [python or sys.executable, "-c", FIND],
            capture_output=True,
            text=True,
            timeout=FIND_S,
            check=False,
        )
        missing = found.stderr.strip().rpartition("\n")[2] if found.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        missing = str(error)
    if missing:
        raise EngineSettingsError(
            f"setting engine.python = {python!r}: engine sglang_jax needs an interpreter of Python 3.12 or "
            f"newer with sglang-jax, which deploy/locks/sglang-jax.txt locks: {missing}"
        )


FAMILIES = ("qwen2", "qwen3")
DTYPES = {"float32": 4, "bfloat16": 2}
"""Name -> bytes per number."""
ROPE_THETA = 10000.0
"""Default base of rotary embeddings."""


def check_model(config: EngineConfig, model: dict[str, Any], model_dir: Path) -> None:
    """Check settings and model config against the engine's abilities.

    Raises:
        EngineSettingsError: the model cannot be served; the message names the setting or the field of
            config.json.
    """
    check_fits(config, model, model_dir)
    if config.tensor_parallel_size != 1:
        raise EngineSettingsError(
            f"engine sglang_jax: tensor_parallel_size is {config.tensor_parallel_size}, only 1 is supported"
        )
    if config.dtype not in DTYPES:
        raise EngineSettingsError(f"engine sglang_jax: dtype is {config.dtype}, not {' or '.join(DTYPES)}")
    if model.get("model_type") not in FAMILIES:
        raise EngineSettingsError(
            f"engine sglang_jax serves {' and '.join(FAMILIES)}, {model_dir} is of model_type "
            f"{model.get('model_type')!r}: use vllm, sglang or hf"
        )
    kind = _rope(model).get("rope_type") or _rope(model).get("type") or "default"
    if kind != "default":
        raise EngineSettingsError(
            f"engine sglang_jax ignores rotary embeddings of type {kind!r}, as {model_dir / 'config.json'} "
            "asks for: use vllm, sglang or hf"
        )
    if model.get("use_sliding_window"):
        raise EngineSettingsError(
            f"engine sglang_jax ignores use_sliding_window, which {model_dir / 'config.json'} asks for: "
            "use vllm, sglang or hf"
        )


def config_overrides(model: dict[str, Any]) -> dict[str, Any]:
    """Return config fields that transformers 4 does not find in a config.json written by transformers 5."""
    return {"rope_theta": _rope(model).get("rope_theta") or model.get("rope_theta") or ROPE_THETA}


def slots_of(config: EngineConfig, model: dict[str, Any]) -> int:
    """Return the number of sequences of `max_model_len` tokens in the KV cache.

    Raises:
        EngineSettingsError: not even one sequence fits into `kv_cache_mb`.
    """
    each = kv_bytes(model, DTYPES[config.dtype]) * config.max_model_len
    found = (config.kv_cache_mb << 20) // each
    if not found:
        raise EngineSettingsError(
            f"engine.kv_cache_mb {config.kv_cache_mb} does not hold one sequence of max_model_len "
            f"{config.max_model_len} tokens, which takes {-(-each >> 20)} MiB"
        )
    return min(found, config.max_running)


def _rope(model: dict[str, Any]) -> dict[str, Any]:
    return model.get("rope_parameters") or model.get("rope_scaling") or {}
