"""Where SGLang lives for tests: an environment of its own beside the main one, and stand-ins for what has no CPU build."""

import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).with_name("sglang_cpu")


def sglang_python() -> str:
    """The interpreter that has SGLang: SGLANG_PYTHON, or that of the environment beside this one that `make setup` builds."""
    return os.environ.get("SGLANG_PYTHON") or str(Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-sglang") / "bin" / "python")


def sglang_settings() -> dict[str, object]:
    """Fields of `EngineConfig`."""
    return {"python": sglang_python(), "environment": {"PYTHONPATH": str(STAND_INS)}}
