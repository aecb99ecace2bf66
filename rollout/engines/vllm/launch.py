"""Starts and stops vLLM's processes, and calls their ranks; builds arguments and checks the model."""

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
import xxhash

from protocol.device.hf_models import code_trust
from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig, Occupancy, Sampling
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S, RankRpcClient, socket_path
from rollout.engines.requests import check_adapters, check_fits, head_dim_of, read_config
from rollout.engines.vllm.core_server import (
    forked_from_server,
    server_pid,
    start_server,
    stop_server,
)
from rollout.engines.vllm.core_start import reported_start
from rollout.engines.vllm.drafts.models import check_draft_model, draft_arguments
from rollout.engines.vllm.imports import (
    cpu_head_sizes,
    eager_environment,
    has_server,
    set_environment,
)
from rollout.engines.vllm.lora import lora_arguments
from rollout.engines.vllm.rank_answers import NumberedCalls
from rollout.engines.vllm.step_records import Packed
from rollout.staging.places import StagingPlace

T = TypeVar("T")

WORKER_EXTENSION = "rollout.engines.vllm.worker.WorkerExtension"
SCHEDULER = "rollout.engines.vllm.scheduling.make_scheduler"  # creates vLLM's own scheduler
SHARED_FILES = ("vllm_dist_", "psm_")
"""Name prefixes of vLLM's files in /dev/shm."""
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
"""Arguments for `engine.batch_invariant`: cached prefixes were computed in other passes."""
ALONE = {**UNCACHED, "max_num_seqs": 1}
"""Arguments for `engine.batch_invariant` without vLLM's own mode: matrix products round differently for other
numbers of rows, also on CPU."""
OWN_MODE = "VLLM_BATCH_INVARIANT"
"""Environment variable that fixes the summation order of vLLM's GPU kernels for any batch size."""
GRAPHS = 512
"""Largest batch for which vLLM captures CUDA graphs by default."""
EXIT_GRACE_S = 1.0
"""Seconds for vLLM's processes to exit on their own."""


class VllmProcesses:
    """AsyncLLM with its processes; calls to ranks fail immediately after a rank has died."""

    def __init__(self, name: str) -> None:
        """Store the engine's name for errors."""
        self.llm: Any = None
        """AsyncLLM; None before `start` and after `stop`."""
        self._name = name
        self._ranks = RankRpcClient(name, self._on_rank_lost)
        self._numbered = NumberedCalls(name)
        self._calls: set[asyncio.Timeout] = set()
        """Timeouts of the calls in progress."""
        self._limits_s: dict[str, float] = {}
        """Method -> timeout of calls that read or write the whole model, seconds; default: CALL_TIMEOUT_S."""
        self.rank_lost = False
        """Whether a rank's process has ended."""
        self._pids: set[int] = set()
        self._files: set[Path] = set()
        """IPC files of the processes, which vLLM does not remove."""

    async def start(self, arguments: dict[str, Any]) -> None:
        """Start AsyncLLM with arguments of AsyncEngineArgs. Cancellation ends the started processes.

        Raises:
            EngineError: the start failed; the message contains vLLM's reason.
        """
        before = {child.pid for child in multiprocessing.active_children()}
        launching = asyncio.get_running_loop().run_in_executor(None, launch, arguments)
        try:
            self.llm = await asyncio.shield(launching)
        except asyncio.CancelledError:
            started = {child.pid for child in multiprocessing.active_children() if child.pid} - before
            end_processes(started, EXIT_GRACE_S)
            await asyncio.wait([launching])
            with suppress(EngineError):
                self.llm = launching.result()
            raise

    def prepare(self, config: EngineConfig) -> None:
        """Set the environment; start the import of vLLM in the fork server if one is used."""
        set_environment(config)
        self._limits_s["install"] = config.start_timeout_s
        if config.staging in (StagingPlace.LAYERS, StagingPlace.AUTO):
            # the engine process answers the other two after a running commit
            behind = "commit", "tether_sampled", "tether_occupancy"
            self._limits_s |= dict.fromkeys(behind, max(CALL_TIMEOUT_S, config.stage_timeout_s))
        if has_server(config.enforce_eager, config.tensor_parallel_size):
            start_server(self)

    def add_pids(self, pids: Iterable[int]) -> None:
        """Record vLLM processes that `stop` waits for, except this process and the server."""
        self._pids |= set(pids) - {os.getpid(), server_pid()}

    async def connect(self, directory: Path, ranks: int) -> None:
        """Connect to the ranks' sockets in `directory`."""
        await self._ranks.connect([socket_path(directory, rank) for rank in range(ranks)])

    def find_shared_files(self) -> None:
        """Record the IPC files of vLLM's processes, which `stop` removes."""
        self._files = shared_files(self._pids)

    async def stop(self, running: Iterable[str]) -> bool:
        """Abort requests, end all processes, and remove their files.

        Args:
            running: vLLM's ids of running requests.

        Returns: whether the engine was started.
        """
        self._ranks.close()
        llm, self.llm = self.llm, None
        if llm is None:
            stop_server(self)
            return False
        with suppress(Exception):  # a dead engine process has already ended its requests
            await llm.abort(list(running))
        # vLLM waits long for its workers, which exit quickly with the extension
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(llm.shutdown), name="vllm-shutdown")
            group.create_task(asyncio.to_thread(end_processes, self._pids, EXIT_GRACE_S), name="vllm-end")
        stop_server(self)
        for path in self._files:
            path.unlink(missing_ok=True)
        end_context(llm)
        return True

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension on all ranks between two steps; return the results."""
        if self.llm is None:
            raise EngineError(f"engine {self._name} is closed")
        number = self._numbered.next()
        answers = self.llm.collective_rpc("tether_call", args=(number, method, arguments))
        return self._numbered.values(number, method, await self._answer(answers, method))

    async def call_anytime(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks over their sockets during their steps; return the results."""
        return await self._ranks.call_each(method, *arguments)

    async def sampled(self, name: str) -> Packed | None:
        """Return the scheduler's record of a request that was aborted; None if there is none."""
        found: Packed | None = await self._ask("tether_sampled", name)
        return found

    async def occupancy(self) -> Occupancy:
        """Return the scheduler's occupancy."""
        return Occupancy(*await self._ask("tether_occupancy"))

    async def pause_scheduler(self) -> None:
        """Stop the scheduler between two steps, keeping all running requests."""
        await self._answer(self.llm.engine_core.pause_scheduler_async("keep", False), "pause")

    async def resume_scheduler(self) -> None:
        """Resume the scheduler."""
        await self._answer(self.llm.engine_core.resume_scheduler_async(), "resume")

    async def drop_kv(self) -> None:
        """Preempt running requests, keeping their tokens, and empty the KV cache.

        Raises:
            EngineError: the cache may still exist.
        """
        if not await self._answer(
            self.llm.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache"
        ):
            raise EngineError(f"engine {self._name}: the KV cache could not be dropped")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method that `scheduling.py` adds to the engine process."""
        if self.llm is None:
            raise EngineError(f"engine {self._name} is closed")
        return await self._answer(self.llm.engine_core.call_utility_async(method, *arguments), method)

    async def _answer(self, answer: Awaitable[T], call: str) -> T:
        """Await vLLM's response to `call` until its timeout or the end of a rank's process.

        Raises:
            EngineError: there was no response, or it was an error.
        """
        limit_s = self._limits_s.get(call, CALL_TIMEOUT_S)
        limit = asyncio.timeout(0 if self.rank_lost else limit_s)
        try:
            async with limit:
                self._calls.add(limit)
                return await answer
        except TimeoutError:
            cause = "a rank's process has ended" if self.rank_lost else f"none within {limit_s:g} s"
            raise EngineError(f"engine {self._name}: no answer to {call}: {cause}") from None
        except Exception as error:
            raise EngineError(f"engine {self._name}: {call}: {error!r}") from error
        finally:
            self._calls.discard(limit)

    def _on_rank_lost(self) -> None:
        """Fail the calls in progress: vLLM reports a dead process only to callers that wait for a request."""
        self.rank_lost = True
        for limit in self._calls:
            limit.reschedule(0)


def engine_arguments(
    config: EngineConfig,
    model_dir: Path,
    incarnation: str,
    lora: LoraConfig,
    worker_extension: str = WORKER_EXTENSION,
    named: int = 0,
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's AsyncEngineArgs.

    Raises:
        EngineSettingsError: vLLM does not support the adapter's rank.
    """
    on_gpu = torch.cuda.is_available()
    memory: dict[str, Any] = (
        {"gpu_memory_utilization": config.memory_fraction}
        if on_gpu
        else {"kv_cache_memory_bytes": config.kv_cache_mb << 20}
    )
    backend = config.attention_backend if on_gpu else ""
    kernels: dict[str, Any] = {"attention_backend": backend} if backend else {}
    captures = on_gpu and not config.enforce_eager and "compilation_config" not in config.arguments
    if captures and config.max_running > GRAPHS:
        kernels["max_cudagraph_capture_size"] = config.max_running
    return {
        "model": str(model_dir),
        **code_trust(),
        "load_format": "auto" if any(model_dir.glob("*.safetensors")) else "dummy",
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # ignore the model's own sampling defaults
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": worker_extension,
        "scheduler_cls": SCHEDULER,
        "enable_sleep_mode": config.enable_sleep_mode,
        # engines with equal seeds would sample equal completions
        "seed": xxhash.xxh3_64_intdigest(incarnation.encode()) % 2**31,
        **({"enable_return_routed_experts": True} if config.enable_return_routed_experts else {}),
        **draft_arguments(config, model_dir),
        **invariance(config) | memory | kernels,
        **lora_arguments(lora, model_dir, named),
        **config.arguments,
    }


def invariance(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments that make results independent of other requests, if configured."""
    if not config.batch_invariant:
        return {}
    return UNCACHED if os.environ.get(OWN_MODE) == "1" and torch.cuda.is_available() else ALONE


def check_model(config: EngineConfig, model_dir: Path, lora: LoraConfig = NO_ADAPTERS) -> dict[str, Any]:
    """Return the model's config after checks that would otherwise fail late or in another process.

    Raises:
        EngineSettingsError: a check failed; the message names the setting or file.
    """
    if config.enable_sleep_mode and not torch.cuda.is_available():
        raise EngineSettingsError(
            "engine.enable_sleep_mode is true, but vLLM cannot sleep on a CPU: "
            "its sleep would silently do nothing"
        )
    if config.enable_return_routed_experts and not torch.cuda.is_available():
        raise EngineSettingsError(
            "setting engine.enable_return_routed_experts: vLLM records experts on a GPU only; "
            "use engine.name 'hf' or 'megatron'"
        )
    if lora.rank and torch.cuda.is_available() and config.dtype == "float32":
        raise EngineSettingsError(
            "setting engine.dtype: vLLM's adapter kernels on a GPU compute in bfloat16 and float16, "
            "not in float32"
        )
    model = read_config(model_dir)
    check_adapters(lora, model_dir)
    check_draft_model(config, model, model_dir, lora)
    head_dim = head_dim_of(model)
    if not torch.cuda.is_available() and head_dim:
        with eager_environment(config.enforce_eager):  # imports vLLM
            sizes = cpu_head_sizes()
        if sizes and head_dim not in sizes:
            raise EngineSettingsError(
                f"{model_dir}: head_dim {head_dim} is not supported by vLLM on a CPU; "
                f"supported are {', '.join(map(str, sizes))}"
            )
    check_fits(config, model, model_dir)
    return model


def launch(arguments: dict[str, Any]) -> Any:
    """Start an AsyncLLM with its processes; blocks for seconds to minutes.

    Raises:
        EngineError: the start failed; the message contains vLLM's reason. EngineSettingsError: vLLM rejects
            the arguments.
    """
    with eager_environment(arguments["enforce_eager"]), reported_start(arguments["model"]):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        is_served = has_server(arguments["enforce_eager"], arguments["tensor_parallel_size"])
        with forked_from_server(is_served):
            # selects the token budget per step of a server with many requests
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
            )


def sampling_parameters(sampling: Sampling) -> Any:
    """Return vLLM's SamplingParams: final output only, with the log-probability of each token."""
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
    """Terminate the ZeroMQ context of a stopped AsyncLLM.

    vLLM leaves this to the garbage collector, which then warns.
    """
    core = getattr(llm, "engine_core", None)
    shadow, context = getattr(core, "ctx", None), getattr(getattr(core, "resources", None), "ctx", None)
    if shadow is None or context is None:
        return
    # `term` blocks while a socket is open
    if all(socket.closed for socket in [*shadow._sockets, *context._sockets]):
        context.term()


def shared_files(pids: set[int]) -> set[Path]:
    """Return the IPC files in /dev/shm of these vLLM processes."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # process has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.name.startswith(SHARED_FILES)}


def end_processes(pids: set[int], grace_s: float) -> None:
    """Wait for the exit of processes; kill them after `grace_s` seconds."""
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
