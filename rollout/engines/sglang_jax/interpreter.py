"""Finds out whether an interpreter has sglang-jax, without importing it."""

import subprocess
import sys
from functools import cache

from protocol.errors import EngineSettingsError

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
        python: the setting; empty: this interpreter.

    Raises:
        EngineSettingsError: naming the missing package, and the lock of an environment with all.
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
