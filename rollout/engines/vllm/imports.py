"""Imports vLLM for an engine: sets variables first, and leaves modules out.

No module of vLLM is imported before one of these functions is called.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.vllm.core_server import fork_server, import_here, without_compiler


def set_environment(config: EngineConfig) -> None:
    """Set what vLLM reads from the environment, before it is imported; its processes inherit it."""
    # On a CPU vLLM runs a single rank in a process of its own, so as to bind threads, which is off here: that
    # process would import vLLM once more, 10 s of computing. AsyncLLM has its engine process in any case.
    one_process = config.tensor_parallel_size == 1 and not torch.cuda.is_available()
    os.environ.update(
        {
            OWNER: str(os.getpid()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(config.start_timeout_s))),
        }
    )
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # vLLM samples with it only where no log-probabilities of the sampled distribution are wanted
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def runs_eagerly(eager: bool) -> bool:
    """Return whether the engine compiles no code: an eager engine on a CPU."""
    return eager and not torch.cuda.is_available()


@contextmanager
def eager_environment(eager: bool) -> Iterator[None]:
    """Keep an eager engine on a CPU from compiling its sampler, for half a minute, while processes start."""
    if not runs_eagerly(eager):
        yield
        return
    from rollout.engines.vllm import eager_core

    with without_compiler():
        eager_core.use_here()
        yield


def import_vllm(config: EngineConfig) -> Callable[[], None] | None:
    """Import what an engine's start will; return what has the server, if there is one, imported already."""
    set_environment(config)
    is_eager = runs_eagerly(config.enforce_eager)
    with without_compiler() if is_eager else nullcontext():
        if is_eager:
            import_here()
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # noqa: F401

        cpu_head_sizes()
    return fork_server if has_server(config.enforce_eager, config.tensor_parallel_size) else None


def has_server(eager: bool, ranks: int) -> bool:
    """Return whether the engine process is forked from the server."""
    return runs_eagerly(eager) and ranks == 1


def cpu_head_sizes() -> list[int]:
    """Return the sizes of an attention head that vLLM supports on a CPU; none if it does not say."""
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    except ImportError:
        return []
    return list(CPUAttentionBackend.get_supported_head_sizes())
