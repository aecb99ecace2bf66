"""Finds the Python environment that has sglang-jax for tests."""

import os
import sys
from pathlib import Path
from typing import Any


def sglang_jax_python() -> str:
    """The interpreter that has it: SGLANG_JAX_PYTHON, or the one of the environment beside this one, which
    `make test-slow` builds."""
    return os.environ.get("SGLANG_JAX_PYTHON") or str(
        Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-jax") / "bin" / "python"
    )


def sglang_jax_settings() -> dict[str, Any]:
    """Fields of `EngineConfig`."""
    return {"python": sglang_jax_python(), "start_timeout_s": 600.0}
