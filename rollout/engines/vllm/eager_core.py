"""Imports vLLM and runs its engine process without vLLM's patches of torch's compiler.

The patches import the compiler, which takes a third of vLLM's import time in every process. Import this
module before vLLM, and only if no code will be compiled.
"""

import functools
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

CORRECTIONS = "vllm.env_override"


def _without_corrections() -> None:
    """Replace the module that applies the patches with an empty one."""
    module = ModuleType(CORRECTIONS)
    vars(module)["_apply_constrain_to_fx_strides_patch"] = lambda: None  # vLLM accesses this name
    sys.modules.setdefault(CORRECTIONS, module)


def use_here() -> None:
    """Let vLLM in this process start its engine process with `run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = functools.partial(run_engine_core, os.getpid(), dict(os.environ))


def run_engine_core(starter: int, environ: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
    """Run the engine process; unpickling this function imports this module before vLLM.

    Args:
        starter: pid of the starting process. A fork server may write to another log.
        environ: environment of the starting process; a fork server's is older.
        args, kwargs: arguments of vLLM's function.
    """
    import torch
    from vllm.v1.engine.core import EngineCoreProc

    os.environ.clear()  # a fork server may have credentials that the starting process has dropped
    os.environ.update(environ)
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # libgomp reads it only at load time
    write_where(starter)
    EngineCoreProc.run_engine_core(*args, **kwargs)


def write_where(pid: int) -> None:
    """Redirect stdout and stderr to those of another process, if its files can be opened."""
    for number in (1, 2):
        with suppress(OSError):
            output = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(output, number)
            os.close(output)


_without_corrections()
