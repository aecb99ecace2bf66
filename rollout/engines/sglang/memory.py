"""The memory of one of SGLang's ranks, given back while the engine sleeps.

SGLang's own release and resume keep what no version brings (buffers, captured graphs) and order the ranks. On
a GPU its memory saver gives the memory back, and takes it under the same addresses. On a CPU that saver does
nothing: there the storages themselves are given back.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from protocol.errors import EngineError
from rollout.staging.releasable_memory import ReleasableMemory

SAVER = "torch_memory_saver"
FIND = f"from importlib.util import find_spec; raise SystemExit(find_spec({SAVER!r}) is None)"


class RankMemory:
    """Parameters and KV cache. Running requests have been put back before they are given back."""

    def __init__(self, scheduler: Any, brought: Iterable[torch.Tensor]) -> None:
        """`brought`: what every version fills again; on a CPU other parameters wait in host memory.

        Raises:
            EngineError: on a GPU, if SGLang's memory saver is not at work.
        """
        self._scheduler = scheduler
        self._updater = scheduler.weight_updater
        if torch.cuda.is_available():
            if not self._updater.memory_saver_adapter.enabled:
                raise EngineError("SGLang's memory saver is not at work: sleep would give nothing back")
            self._storages = ReleasableMemory([])
            return
        cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        model = scheduler.tp_worker.model_runner.model
        self._storages = ReleasableMemory(
            [*brought, *cache.k_buffer, *cache.v_buffer], kept=model.parameters()
        )

    def give_back(self) -> None:
        """The KV cache must be empty and no request running."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        with _queue_aside(self._scheduler):
            self._updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        self._storages.release()

    def take_back(self) -> None:
        """Raises EngineError, or what the memory saver raises, if there is no room."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._storages.restore()
        self._updater.resume_memory_occupation(ResumeMemoryOccupationReqInput())


def empty_cache(scheduler: Any) -> bool:
    """Empty the KV cache, with no request running. Returns false if SGLang will not."""
    with _queue_aside(scheduler):
        return bool(scheduler.flush_cache(empty_cache=False))


async def check_memory_saver(python: str) -> None:
    """Raises EngineError if SGLang's interpreter lacks what gives memory back on a GPU."""
    process = await asyncio.create_subprocess_exec(python, "-c", FIND, stdin=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise EngineError(
            f"engine.enable_sleep_mode is true, but {python} has no {SAVER}, by which SGLang gives memory back: "
            f"install {SAVER.replace('_', '-')} there"
        )


@contextmanager
def _queue_aside(scheduler: Any) -> Iterator[None]:
    """Of requests that wait nothing is in the KV cache, but SGLang 0.5.15 neither empties it nor gives memory
    back while some do."""
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
