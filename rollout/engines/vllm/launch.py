"""Starts and stops vLLM's processes, and calls their ranks: environment, arguments, checks of the model."""

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
SCHEDULER = "rollout.engines.vllm.scheduling.make_scheduler"  # which makes vLLM's own
SHARED_FILES = ("vllm_dist_", "psm_")
"""How names of vLLM's files in /dev/shm begin."""
UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}
"""Arguments for `engine.batch_invariant`: a prefix from the cache was computed in another pass."""
ALONE = {**UNCACHED, "max_num_seqs": 1}
"""Arguments for it without vLLM's own mode: products of matrices round otherwise with other numbers of rows,
also on a CPU."""
OWN_MODE = "VLLM_BATCH_INVARIANT"
"""Variable that gives vLLM's kernels on a GPU one order of sums, however many requests share a pass."""
GRAPHS = 512
"""Largest batch for which vLLM captures CUDA graphs by itself."""
EXIT_GRACE_S = 1.0
"""For vLLM's processes to end by themselves."""


class VllmProcesses:
    """One AsyncLLM with its processes, and calls to its ranks that fail at once when a rank has died."""

    def __init__(self, name: str) -> None:
        """Store the arguments; `name` is the engine's, in errors."""
        self.llm: Any = None
        """AsyncLLM; None before `start` and from `stop` on."""
        self._name = name
        self._ranks = RankRpcClient(name, self._on_rank_lost)
        self._numbered = NumberedCalls(name)
        self._calls: set[asyncio.Timeout] = set()
        """Limits of the calls that wait for an answer."""
        self._limits_s: dict[str, float] = {}
        """Seconds for calls that read or write the whole model; others have CALL_TIMEOUT_S."""
        self.rank_lost = False
        """Whether a rank's process has ended."""
        self._pids: set[int] = set()
        self._files: set[Path] = set()
        """Files by which the processes communicate, and which vLLM leaves behind."""

    async def start(self, arguments: dict[str, Any]) -> None:
        """Start AsyncLLM with these arguments of AsyncEngineArgs; cancelled, it ends what it has started.

        Raises:
            EngineError: with vLLM's reason.
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
        """Set the environment, and let the server begin to import vLLM where the engine is forked from it."""
        set_environment(config)
        self._limits_s["install"] = config.start_timeout_s
        if config.staging in (StagingPlace.LAYERS, StagingPlace.AUTO):
            # the engine process answers the other two after a commit that it is at
            behind = "commit", "tether_sampled", "tether_occupancy"
            self._limits_s |= dict.fromkeys(behind, max(CALL_TIMEOUT_S, config.stage_timeout_s))
        if has_server(config.enforce_eager, config.tensor_parallel_size):
            start_server(self)

    def add_pids(self, pids: Iterable[int]) -> None:
        """Note processes of vLLM, which `stop` waits for; this one and the server are left out."""
        self._pids |= set(pids) - {os.getpid(), server_pid()}

    async def connect(self, directory: Path, ranks: int) -> None:
        """Connect to the ranks' sockets in `directory`."""
        await self._ranks.connect([socket_path(directory, rank) for rank in range(ranks)])

    def find_shared_files(self) -> None:
        """Note the files by which vLLM's processes communicate, which `stop` removes."""
        self._files = shared_files(self._pids)

    async def stop(self, running: Iterable[str]) -> bool:
        """Abort requests, end all processes, and remove what they leave behind.

        Args:
            running: vLLM's ids of the requests that run.

        Returns: whether there was anything to stop.
        """
        self._ranks.close()
        llm, self.llm = self.llm, None
        if llm is None:
            stop_server(self)
            return False
        with suppress(Exception):  # an engine process that is dead has ended its requests already
            await llm.abort(list(running))
        # vLLM waits long for its workers; with our part in them they need no more than a moment
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(llm.shutdown), name="vllm-shutdown")
            group.create_task(asyncio.to_thread(end_processes, self._pids, EXIT_GRACE_S), name="vllm-end")
        stop_server(self)
        for path in self._files:
            path.unlink(missing_ok=True)
        end_context(llm)
        return True

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answers of all ranks to a method of their worker extension, given between two steps."""
        if self.llm is None:
            raise EngineError(f"engine {self._name} is closed")
        number = self._numbered.next()
        answers = self.llm.collective_rpc("tether_call", args=(number, method, arguments))
        return self._numbered.values(number, method, await self._answer(answers, method))

    async def call_anytime(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answers of all ranks to a call over their sockets, during their steps."""
        return await self._ranks.call_each(method, *arguments)

    async def sampled(self, name: str) -> Packed | None:
        """Return the scheduler's record of a request that did not end by itself; None: it has none."""
        found: Packed | None = await self._ask("tether_sampled", name)
        return found

    async def occupancy(self) -> Occupancy:
        """Return the scheduler's own numbers."""
        return Occupancy(*await self._ask("tether_occupancy"))

    async def pause_scheduler(self) -> None:
        """Stop the scheduler between two steps, keeping every running request."""
        await self._answer(self.llm.engine_core.pause_scheduler_async("keep", False), "pause")

    async def resume_scheduler(self) -> None:
        """Let the scheduler continue."""
        await self._answer(self.llm.engine_core.resume_scheduler_async(), "resume")

    async def drop_kv(self) -> None:
        """Preempt running requests, with their tokens, and empty the KV cache.

        Raises:
            EngineError: the cache may still be there.
        """
        if not await self._answer(
            self.llm.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache"
        ):
            raise EngineError(f"engine {self._name}: the KV cache could not be dropped")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the answer of a method that `scheduling.py` gives the engine process."""
        if self.llm is None:
            raise EngineError(f"engine {self._name} is closed")
        return await self._answer(self.llm.engine_core.call_utility_async(method, *arguments), method)

    async def _answer(self, answer: Awaitable[T], call: str) -> T:
        """Await vLLM's answer to `call`, at most until one of its processes has ended.

        Raises:
            EngineError: there was none, or it was an error.
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
        """End the calls that wait: vLLM reports a dead process only to those that wait for a request."""
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
        EngineSettingsError: if vLLM has no adapters of that rank.
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
        "generation_config": "vllm",  # not the model's own sampling defaults
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": worker_extension,
        "scheduler_cls": SCHEDULER,
        "enable_sleep_mode": config.enable_sleep_mode,
        # engines with one seed would sample the same completions
        "seed": xxhash.xxh3_64_intdigest(incarnation.encode()) % 2**31,
        **({"enable_return_routed_experts": True} if config.enable_return_routed_experts else {}),
        **draft_arguments(config, model_dir),
        **invariance(config) | memory | kernels,
        **lora_arguments(lora, model_dir, named),
        **config.arguments,
    }


def invariance(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments with which a request's bits do not depend on others, if they are not to."""
    if not config.batch_invariant:
        return {}
    return UNCACHED if os.environ.get(OWN_MODE) == "1" and torch.cuda.is_available() else ALONE


def check_model(config: EngineConfig, model_dir: Path, lora: LoraConfig = NO_ADAPTERS) -> dict[str, Any]:
    """Return the model's config, after checks of what would fail late or in another process.

    Raises:
        EngineSettingsError: naming the culprit.
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
        with eager_environment(config.enforce_eager):  # vLLM is imported here
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
        EngineError: with vLLM's reason; EngineSettingsError if it refuses the arguments.
    """
    with eager_environment(arguments["enforce_eager"]), reported_start(arguments["model"]):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        is_served = has_server(arguments["enforce_eager"], arguments["tensor_parallel_size"])
        with forked_from_server(is_served):
            # by its use vLLM chooses how many tokens a step computes: a server of many requests
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER
            )


def sampling_parameters(sampling: Sampling) -> Any:
    """Return vLLM's SamplingParams: tokens and the log-probability of each, once, at the end."""
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
    """Terminate the ZeroMQ context of an AsyncLLM that was shut down.

    vLLM leaves that to the garbage collector, which then warns about it.
    """
    core = getattr(llm, "engine_core", None)
    shadow, context = getattr(core, "ctx", None), getattr(getattr(core, "resources", None), "ctx", None)
    if shadow is None or context is None:
        return
    # with an open socket `term` would block
    if all(socket.closed for socket in [*shadow._sockets, *context._sockets]):
        context.term()


def shared_files(pids: set[int]) -> set[Path]:
    """Return the files in /dev/shm by which these processes of vLLM communicate."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.name.startswith(SHARED_FILES)}


def end_processes(pids: set[int], grace_s: float) -> None:
    """Wait until these processes have ended, and kill those that are left after `grace_s` seconds."""
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
