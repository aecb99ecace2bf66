"""Imports vLLM, and runs its engine process, without its corrections of torch's compiler.

To apply them vLLM imports the compiler, a third of the time of importing vLLM in every process. Import this
module before vLLM, and only where no code will be compiled.
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
    """Put an empty module in the place of the one that applies them as it is imported."""
    module = ModuleType(CORRECTIONS)
    vars(module)["_apply_constrain_to_fx_strides_patch"] = lambda: None  # asked for by name
    sys.modules.setdefault(CORRECTIONS, module)


def use_here() -> None:
    """Have vLLM in this process start its engine process by `run_engine_core`."""
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core = functools.partial(run_engine_core, os.getpid(), dict(os.environ))


def run_engine_core(starter: int, environ: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
    """Be the engine process: it has imported this module before it reads what refers to vLLM.

    Args:
        starter: process that started it. A server that it is forked from may write to another log.
        environ: variables of that process; a server has older ones.
        args: of vLLM's function.
        kwargs: of vLLM's function.
    """
    import torch
    from vllm.v1.engine.core import EngineCoreProc

    os.environ.clear()  # a server may have credentials that the starting process has dropped
    os.environ.update(environ)
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # libgomp reads it as it is loaded: a fork has it
    write_where(starter)
    EngineCoreProc.run_engine_core(*args, **kwargs)


def write_where(pid: int) -> None:
    """Send this process's output to the file of another process's output, if that file can be opened."""
    for number in (1, 2):
        with suppress(OSError):
            output = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(output, number)
            os.close(output)


_without_corrections()
