"""Releases the memory of an SGLang rank during sleep.

SGLang's own release and resume preserve memory that no version fills (buffers, captured graphs), and
synchronize the ranks. On GPU its memory saver unmaps the memory and maps it again at the same addresses. On
CPU the memory saver has no effect, so the storages themselves are released.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from protocol.errors import EngineSettingsError
from rollout.staging.releasable_memory import ReleasableMemory

SAVER = "torch_memory_saver"
FIND = f"from importlib.util import find_spec; raise SystemExit(find_spec({SAVER!r}) is None)"


class RankMemory:
    """Parameters and KV cache of one rank; releasable only while no request runs."""

    def __init__(self, scheduler: Any, updated: Iterable[torch.Tensor]) -> None:
        """Collect the memory of SGLang's `scheduler`.

        Args:
            scheduler: SGLang's scheduler with a loaded model.
            updated: parameters that every version overwrites; on CPU, others are kept in host memory.

        Raises:
            EngineSettingsError: SGLang's memory saver is disabled on a GPU.
        """
        self._scheduler = scheduler
        self._updater = scheduler.weight_updater
        if torch.cuda.is_available():
            if not self._updater.memory_saver_adapter.enabled:
                raise EngineSettingsError("SGLang's memory saver is not enabled: sleep would release nothing")
            self._storages = ReleasableMemory([])
            return
        cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        model = scheduler.tp_worker.model_runner.model
        # latent vectors use a single buffer instead of keys and values
        latents = getattr(cache, "kv_buffer", None)
        held = [*cache.k_buffer, *cache.v_buffer] if latents is None else latents
        self._storages = ReleasableMemory([*updated, *held], kept=model.parameters())

    def release(self) -> None:
        """Release the memory. Requires an empty KV cache and no running request."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        with _without_waiting_queue(self._scheduler):
            self._updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        self._storages.release()

    def restore(self) -> None:
        """Reallocate the memory. Raises EngineError or the memory saver's error if memory is insufficient."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._storages.restore()
        self._updater.resume_memory_occupation(ResumeMemoryOccupationReqInput())


def empty_cache(scheduler: Any) -> bool:
    """Empty the KV cache while no request runs; return False if SGLang refuses."""
    with _without_waiting_queue(scheduler):
        return bool(scheduler.flush_cache(empty_cache=False))


async def check_memory_saver(python: str) -> None:
    """Raise EngineSettingsError if SGLang's interpreter lacks the package torch_memory_saver."""
    process = await asyncio.create_subprocess_exec(python, "-c", FIND, stdin=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise EngineSettingsError(
            f"engine.enable_sleep_mode is true, but {python} has no {SAVER}, by which SGLang releases "
            f"memory: install {SAVER.replace('_', '-')} there"
        )


@contextmanager
def _without_waiting_queue(scheduler: Any) -> Iterator[None]:
    """Hide queued requests from SGLang in the body.

    They have no tokens in the KV cache, but SGLang 0.5.15 neither empties the cache nor releases memory while
    requests are queued.
    """
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
