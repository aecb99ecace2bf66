"""Imports vLLM, and runs its engine process, without its corrections of torch's compiler.

To apply them vLLM imports the compiler, a third of the time of importing vLLM in every process. Import this
module before vLLM, and only where nothing will be compiled.
"""

import functools
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

CORRECTIONS = "vllm.env_override"


def _without_corrections() -> None:
    """Put an empty module in the place of the one that applies them as it is imported."""
    module = ModuleType(CORRECTIONS)
    vars(module)["_apply_constrain_to_fx_strides_patch"] = lambda: None  # asked for by name
    sys.modules.setdefault(CORRECTIONS, module)


def use_here() -> None:
    """Have vLLM in this process start its engine process by `run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = functools.partial(run_engine_core, dict(os.environ))


def run_engine_core(environ: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
    """Be the engine process: it has imported this module before it reads what refers to vLLM.

    Args:
        environ: variables of the process that started it; a server that it is forked from has older ones.
        args: of vLLM's function.
        kwargs: of vLLM's function.
    """
    from vllm.v1.engine.core import EngineCoreProc

    os.environ.update(environ)
    EngineCoreProc.run_engine_core(*args, **kwargs)


_without_corrections()
