"""Starting vLLM: environment, arguments, and what is known about the model before it is loaded."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import xxhash

from protocol.errors import EngineError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.requests import check_adapters, check_fits, read_config
from rollout.engines.vllm.lora import lora_arguments

SHARED_FILES = ("vllm_dist_", "psm_")
MIN_BATCHED_TOKENS = 2048
"""Tokens that one step may prefill, where `max_model_len` is not more."""


def set_environment(config: EngineConfig) -> None:
    """What vLLM reads from the environment; must come before it is imported, and is passed on to its
    processes."""
    os.environ.update(
        {
            OWNER: str(os.getpid()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(config.start_timeout_s))),
        }
    )
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


@contextmanager
def eager_environment(eager: bool) -> Iterator[None]:
    """While engine processes are started: on a CPU, keep an eager engine from compiling its sampler for half
    a minute."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    if eager and not torch.cuda.is_available():
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def engine_arguments(
    config: EngineConfig, model_dir: Path, incarnation: str, lora: LoraConfig
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    Raises:
        EngineError: if vLLM does not have adapters of that rank.
    """
    on_gpu = torch.cuda.is_available()
    memory = (
        {"gpu_memory_utilization": config.memory_fraction}
        if on_gpu
        else {"kv_cache_memory_bytes": config.kv_cache_mb << 20}
    )
    kernels = {"attention_backend": config.attention_backend} if on_gpu and config.attention_backend else {}
    return {
        "model": str(model_dir),
        "load_format": "auto" if any(model_dir.glob("*.safetensors")) else "dummy",
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, config.max_model_len),
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        # with it a token may be in flight at a commit, sampled under weights that its step no longer shows
        "async_scheduling": False,
        "worker_extension_cls": "rollout.engines.vllm.worker.WorkerExtension",
        "enable_sleep_mode": config.enable_sleep_mode,
        # engines with one seed would sample the same completions
        "seed": xxhash.xxh3_64_intdigest(incarnation.encode()) % 2**31,
        **memory,
        **kernels,
        **lora_arguments(lora),
    }


def check_model(config: EngineConfig, model_dir: Path, lora: LoraConfig = NO_ADAPTERS) -> dict[str, Any]:
    """Find what would otherwise fail late or in another process. Returns the model's config.

    Raises:
        EngineError: naming the culprit.
    """
    if config.enable_sleep_mode and not torch.cuda.is_available():
        raise EngineError(
            "engine.enable_sleep_mode is true, but vLLM cannot sleep on a CPU: its sleep would do nothing and not say so"
        )
    if lora.rank and torch.cuda.is_available() and config.dtype == "float32":
        raise EngineError(
            "setting engine.dtype: vLLM's adapter kernels on a GPU compute in bfloat16 and float16, not in float32"
        )
    model = read_config(model_dir)
    check_adapters(lora, model_dir)
    heads = int(model.get("num_attention_heads") or 0)
    head_dim = int(model.get("head_dim") or (int(model.get("hidden_size", 0)) // heads if heads else 0))
    if not torch.cuda.is_available() and head_dim:
        sizes = _cpu_head_sizes()
        if sizes and head_dim not in sizes:
            raise EngineError(
                f"{model_dir}: head_dim {head_dim} is not supported by vLLM on a CPU; it can be {', '.join(map(str, sizes))}"
            )
    check_fits(config, model, model_dir)
    return model


def _cpu_head_sizes() -> list[int]:
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    except ImportError:
        return []
    return list(CPUAttentionBackend.get_supported_head_sizes())


def launch(arguments: dict[str, Any]) -> Any:
    """An AsyncLLM with its processes up; blocks for seconds to minutes.

    Raises:
        EngineError: with vLLM's reason.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        with eager_environment(arguments["enforce_eager"]):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except Exception as error:  # vLLM raises many kinds; all of them mean that it did not start
        raise EngineError(f"vLLM cannot serve {arguments['model']}: {error}") from error


def sampling_parameters(sampling: Sampling) -> Any:
    """As vLLM's SamplingParams: tokens and the log-probability of each, once, at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def end_context(llm: Any) -> None:
    """Terminate the zmq context of an AsyncLLM that was shut down; vLLM leaves that to the garbage collector,
    which complains."""
    core = getattr(llm, "engine_core", None)
    shadow, context = getattr(core, "ctx", None), getattr(getattr(core, "resources", None), "ctx", None)
    if shadow is None or context is None:
        return
    if all(
        socket.closed for socket in [*shadow._sockets, *context._sockets]
    ):  # with an open one `term` would block
        context.term()


def shared_files(pids: set[int]) -> set[Path]:
    """Files in /dev/shm by which processes of ours talk to each other."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.name.startswith(SHARED_FILES)}


def end_processes(pids: set[int], grace_s: float) -> None:
    """Wait until processes of ours have ended; kill those that have not after `grace_s`. Returns when none is
    left."""
    children = [child for child in multiprocessing.active_children() if child.pid in pids]
    others = []
    for pid in pids - {child.pid for child in children}:
        with suppress(psutil.NoSuchProcess):
            others.append(psutil.Process(pid))
    _, left = psutil.wait_procs(others, timeout=grace_s)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for child in children:
        child.join(grace_s)
        if child.is_alive():
            child.kill()
            child.join()
    psutil.wait_procs(left, timeout=grace_s)
