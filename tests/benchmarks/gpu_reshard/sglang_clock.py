"""Plug-in of SGLang that writes down when each step of the first rank's scheduler begins.

It has a module of its own, and imports little: SGLang loads it in every process.
"""

import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

SCHEDULER = "sglang.srt.managers.scheduler"
ROW = struct.Struct("<dI?")

_file: list[int] = []


def load() -> None:
    """Register the hook, in processes that have a scheduler."""
    if "BENCH_STEPS" not in os.environ or SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.Scheduler.run_batch", _timed, HookType("around"))


def _timed(run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.distributed.get_rank() == 0 and batch.reqs:
        if not _file:
            _file.append(os.open(os.environ["BENCH_STEPS"], os.O_CREAT | os.O_WRONLY | os.O_APPEND))
        row = ROW.pack(time.monotonic(), len(batch.reqs), bool(batch.forward_mode.is_extend()))
        os.write(_file[0], row)
    return run(scheduler, batch, *args, **kwargs)
