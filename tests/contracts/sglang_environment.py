"""Finds the Python environment that has SGLang for tests, and stand-ins for what has no CPU build."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

STAND_INS = Path(__file__).with_name("sglang_cpu")
BESIDE_OTHERS: dict[str, Any] = {
    "memory_fraction": 0.4,
    "arguments": {"max_total_tokens": 1 << 15},
    "environment": {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
}
"""Fields of `EngineConfig` for GPUs that other engines use, too: the fraction counts what they take
meanwhile as this engine's, so that a number of tokens bounds the KV cache; and ranks do not start where they
find less memory on one GPU than on another."""


def sglang_python() -> str:
    """The interpreter that has SGLang: SGLANG_PYTHON, or that of the environment beside this one that `make
    setup` builds.

    On a host with GPUs nothing is set up, and this one is to have it.
    """
    if torch.cuda.is_available():
        return os.environ.get("SGLANG_PYTHON") or sys.executable
    return os.environ.get("SGLANG_PYTHON") or str(
        Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-sglang") / "bin" / "python"
    )


def sglang_beside_others(ranks: int = 1) -> dict[str, Any]:
    """Return `sglang_settings`, on a GPU with `BESIDE_OTHERS`."""
    return sglang_settings(ranks) | (BESIDE_OTHERS if torch.cuda.is_available() else {})


def sglang_settings(ranks: int = 1) -> dict[str, Any]:
    """Fields of `EngineConfig`. Three processes import SGLang at each start: 20 s on two idle cores, and
    minutes on busy ones."""
    started = {"python": sglang_python(), "start_timeout_s": 600.0}
    if torch.cuda.is_available():
        return {**started, "attention_backend": "triton"}  # is there with every build of SGLang
    cores = sorted(os.sched_getaffinity(0))
    environment = {"PYTHONPATH": str(STAND_INS)}
    if ranks > 1:  # by itself SGLang has at most one rank for each NUMA node
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(ranks)
        )
    return {**started, "environment": environment}
