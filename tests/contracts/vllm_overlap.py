"""Makes vLLM schedule asynchronously on a CPU, as it does on a GPU, where the scheduler is a step ahead.

vLLM turns that off on a CPU, where nothing is gained. Its scheduler, engine loop and model runner are its own
here; only streams and events, which a CPU lacks, are replaced, by ones that are always ready.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from multiprocessing import parent_process
from typing import Any

import torch

from rollout.engines.vllm.imports import eager_environment
from rollout.engines.vllm.worker import WorkerExtension


@contextmanager
def overlapping(engine: Any) -> Iterator[None]:
    """Have vLLM schedule asynchronously for an engine that starts in the block."""
    if torch.cuda.is_available():  # it does so by itself
        yield
        return
    engine.worker_extension = f"{__name__}.{OverlapExtension.__name__}"
    with eager_environment(True):
        undo = _turn_on()
    try:
        yield
    finally:
        undo()


@asynccontextmanager
async def started(engine: Any) -> AsyncIterator[Any]:
    """Start an engine that schedules asynchronously, and close it after the block."""
    with overlapping(engine):
        await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def _turn_on() -> Callable[[], None]:
    """Have vLLM leave asynchronous scheduling on in this process; return what undoes it."""
    from vllm.platforms.cpu import CpuPlatform

    before = vars(CpuPlatform)["check_and_update_config"]

    def check_and_turn_on(platform: Any, config: Any) -> None:
        before.__func__(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_turn_on)
    return partial(setattr, CpuPlatform, "check_and_update_config", before)


class Ready:
    """Stream or event of a device on which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *args: Any) -> None:
        """There is nothing to mark."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """There is nothing to wait for."""


class OverlapExtension(WorkerExtension):
    """The extension, which counts the commits that fell behind a step whose result was not fetched yet."""

    def tether_install(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        runner = self.model_runner  # type: ignore[attr-defined]
        self._tether_unfetched = self._tether_behind = 0
        sample = runner.sample_tokens

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            wait = output.get_output
            self._tether_unfetched += 1

            def get_output() -> Any:
                self._tether_unfetched -= 1
                return wait()

            output.get_output = get_output
            return output

        runner.sample_tokens = sample_tokens
        return super().tether_install(*args, **kwargs)

    def tether_commit(self, manifest: bytes) -> dict[str, Any]:
        self._tether_behind += bool(self._tether_unfetched)
        return super().tether_commit(manifest)

    def tether_behind(self) -> int:
        """Return how many commits were carried out while a step was in flight."""
        return self._tether_behind


def _replace_streams() -> None:
    """Replace what vLLM's model runner takes of a device for its asynchronous results."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = cuda.current_stream = Ready
    cuda.stream = lambda stream: nullcontext()


if not torch.cuda.is_available():
    _replace_streams()
    if parent_process() is not None:  # the engine's process: a model that drafts has its config checked there
        _turn_on()
