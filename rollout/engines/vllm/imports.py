"""Imports vLLM for an engine, after setting environment variables and skipping modules.

No vLLM module is imported before one of these functions is called.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.vllm.core_server import fork_server, import_here, without_compiler


def set_environment(config: EngineConfig) -> None:
    """Set the environment variables that vLLM reads at import; its processes inherit them."""
    # On CPU, vLLM runs even a single rank in its own process to bind threads, which is disabled here. That
    # process would import vLLM again (10 s of CPU time). AsyncLLM has an engine process in any case.
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
        # vLLM uses it only if log-probabilities of the sampled distribution are not requested
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def runs_eagerly(eager: bool) -> bool:
    """Return whether the engine compiles no code: an eager engine on CPU."""
    return eager and not torch.cuda.is_available()


@contextmanager
def eager_environment(eager: bool) -> Iterator[None]:
    """Keep an eager CPU engine from compiling its sampler (half a minute) while processes start."""
    if not runs_eagerly(eager):
        yield
        return
    from rollout.engines.vllm import eager_core

    with without_compiler():
        eager_core.use_here()
        yield


def import_vllm(config: EngineConfig) -> Callable[[], None] | None:
    """Import the modules of an engine's start; return a function that forks the server, if one is used."""
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
    """Return the attention head sizes that vLLM supports on CPU; empty if unknown."""
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    except ImportError:
        return []
    return list(CPUAttentionBackend.get_supported_head_sizes())
