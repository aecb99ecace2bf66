"""Stages, commits, sleeps and records token versions inside SGLang's processes.

SGLang calls `load` in each of its processes through the entry point group `sglang.srt.plugins`; `launch.py`
writes the entry point to a directory that SGLang searches. Calls arrive on a socket of rank 0. SGLang
broadcasts them with its requests at the top of the scheduler loop, where all ranks are between the same two
steps. SGLang overlaps steps: at this point kernels of the last step may still run, and its result is not
processed. A commit waits for the kernels; their tokens have the version under which they were launched.
Operations that drop the KV cache let SGLang process the result first.
"""

import os
import pkgutil
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from protocol.device.profiles import StepProfile
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.processed_layers import plan_of
from rollout.engines.multi_process.rank_rpc import RankCall, RankRpcServer, socket_path
from rollout.engines.sglang.cpu import attend_to_latents, divide_experts, pin_nothing
from rollout.engines.sglang.layers import loader_of, remember, sglang_processings
from rollout.engines.sglang.lora import trace_adapter
from rollout.engines.sglang.memory import RankMemory, empty_cache
from rollout.engines.sglang.sampling import CARRIER, record_version, sample_with_dropped_tokens_masked
from rollout.engines.weight_state import WeightState
from rollout.staging.places import StagingRoom
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankCommit
from rollout.staging.shadows import ShadowedPlan
from rollout.staging.staging_plan import AnyPlan

DIRECTORY = "TETHER_ENGINE_DIR"
"""Environment variable with the directory of the ranks' sockets, private to this engine."""
SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Register the hooks; SGLang calls this in every process.

    No effect in processes that belong to no engine of this project.
    """
    if not exit_with_parent(_end) or SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, HookType(kind))
    if not torch.cuda.is_available():
        pin_nothing()
        divide_experts()


def _end(owner: int) -> None:
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engine settings for a rank, sent by the engine's process."""

    architecture: str
    """Class name of the model in transformers, from its config.json."""
    adapter: bool
    """Whether versions contain an adapter instead of the model's weights."""
    recompute: bool
    """Whether a commit drops the KV cache."""
    sleeps: bool
    """Whether the engine can sleep."""
    staging: str
    """See `EngineConfig`."""
    staging_mb: int
    """See `EngineConfig`."""


class SchedulerRank:
    """One rank with its scheduler, its shard of the weights, and its pending calls."""

    def __init__(self, scheduler: Any) -> None:
        """Start listening for calls; `scheduler` is SGLang's, with a loaded model."""
        self.scheduler = scheduler
        self.weights = WeightState()
        self._staging: RankStaging | None = None
        self._memory: RankMemory | None = None
        self.prefixes = "0/"
        """Key of cached prefixes computed by the live weights; SGLang appends the adapter."""
        self._recompute = False
        self._paused = False
        self.profile = StepProfile()
        self._arrived: deque[RankCall] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._wake, select.POLLIN)
        # a completion ends at its request's stop tokens, not at the model's end-of-text token
        scheduler.model_config.hf_eos_token_id = set()
        self.number = torch.distributed.get_rank()
        self._server = RankRpcServer(socket_path(Path(os.environ[DIRECTORY]), self.number), self._arrive)

    def pull(self) -> list[RankCall]:
        """Return the calls that arrived since the last call of this method."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        calls = []
        while self._arrived:
            calls.append(self._arrived.popleft())
        return calls

    def run(self, call: RankCall) -> None:
        """Execute a call and send its answer."""
        self._server.carry_out(call, lambda *arguments: METHODS[call.method](self, *arguments))

    def install(self, shapes: dict[str, list[int]], settings: dict[str, Any]) -> dict[str, Any]:
        """Trace the loader and calibrate; return {"bytes", "unplaced"}.

        Args:
            shapes: checkpoint name -> shape of the tensors in versions.
            settings: `RankSettings` as plain values.
        """
        # both users of this file keep it open, and neither removes it
        with suppress(AttributeError, FileNotFoundError):
            os.unlink(self.scheduler.load_snapshot_writer.path)
        missing = [target for target in [CARRIER, *HOOKS] if not _is_available(target)]
        if missing:
            raise NotImplementedError(
                f"this SGLang has no {', '.join(missing)} as tether needs it; 0.5.15 and 0.5.23 have"
            )
        given = msgspec.convert(settings, RankSettings)
        plan = self._trace({name: tuple(shape) for name, shape in shapes.items()}, given)
        tied = not given.adapter and bool(
            getattr(self.scheduler.model_config.hf_text_config, "tie_word_embeddings", False)
        )
        self._staging = RankStaging(plan, architecture=given.architecture, tied=tied)
        self._memory = RankMemory(self.scheduler, plan.live.values()) if given.sleeps else None
        self._recompute = given.recompute
        return {"bytes": self._staging.bytes, "unplaced": self._staging.unplaced}

    def stage(self, manifest: bytes, deadline_s: float) -> str:
        """Start staging in the background; return the reason of a refusal, or ""."""
        return self.staging.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def commit(self, manifest: bytes) -> RankCommit:
        """Copy the staged version over the live weights; drop the KV cache if configured."""
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        start = time.perf_counter()
        _wait_for_kernels()
        slept = self.weights.released
        result = self.staging.commit(decoded)
        if result.applied:
            self.weights.serve(Served(decoded.epoch, decoded.version, decoded.digest))
            if self._recompute and not slept and not self._drop_kv():
                error = "the new weights are live, but the old KV cache could not be dropped"
                result = replace(result, poisoned=True, error=error)
            self._separate_prefixes()
            self._resume_scheduler()
            result = replace(result, copy_ms=(time.perf_counter() - start) * 1e3)
        return result

    def rename(self, version: int) -> None:
        """Record tokens of later steps under `version`."""
        self.weights.serve(self.weights.renamed(self.weights.served.epoch, version))

    def sleep(self) -> str:
        """Requeue running requests with their tokens, and release all memory; return why it failed, or "".

        No step follows before the next commit.
        """
        assert self._memory is not None, "the engine was not started to sleep"
        _wait_for_kernels()
        self.weights.release()
        if not self._drop_kv():
            return "the KV cache could not be dropped"
        refusal = self.staging.sleep()
        if not refusal:
            self._memory.release()
        return refusal

    def wake(self) -> str:
        """Reallocate the memory; the next commit provides the weights. Return why it failed, or ""."""
        assert self._memory is not None, "the engine was not started to sleep"
        self._memory.restore()
        self.weights.wake()
        return self.staging.wake()

    def pause(self) -> None:
        """Stop between two steps."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._paused = True
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))

    def resume(self) -> None:
        """Resume, or if there are no weights, let the next commit resume."""
        self._paused = False
        self._resume_scheduler()

    def wait_idle(self) -> None:
        """Wait up to a second for requests and calls; otherwise a paused scheduler would busy-wait."""
        if self.scheduler._engine_paused and self.scheduler.idle_sleeper is not None:
            self.scheduler.idle_sleeper.maybe_sleep()

    @property
    def staging(self) -> RankStaging:
        """Live and staged weights of this rank."""
        assert self._staging is not None, "install comes first"
        return self._staging

    def _trace(self, shapes: dict[str, tuple[int, ...]], settings: RankSettings) -> AnyPlan | ShadowedPlan:
        runner = self.scheduler.tp_worker.model_runner
        if settings.adapter:
            return trace_adapter(runner.lora_manager, shapes, settings.staging_mb)
        return plan_of(
            loader_of(runner.model),
            lambda differing: sglang_processings(runner.model, differing),
            shapes,
            runner.dtype,
            StagingRoom(settings.staging, settings.staging_mb),
            Path(self.scheduler.server_args.model_path),
        )

    def _separate_prefixes(self) -> None:
        """Keep queued requests from using prefixes of the old weights."""
        self.prefixes = f"{int(self.prefixes.removesuffix('/')) + 1}/"
        for request in self.scheduler.waiting_queue:
            self.separate(request)

    def separate(self, request: Any) -> None:
        """Restrict a (re)starting request to prefixes computed by the live weights."""
        request.extra_key = self.prefixes + request.extra_key.partition("/")[2]

    def _drop_kv(self) -> bool:
        """Retract running requests, with their tokens, and empty the cache; return False on refusal."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        dropped = empty_cache(self.scheduler)
        self._resume_scheduler()
        return dropped

    def _resume_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if not (self._paused or self.weights.released):
            self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _arrive(self, call: RankCall) -> None:
        self._arrived.append(call)
        os.eventfd_write(self._wake, 1)


METHODS: dict[str, Callable[..., Any]] = {
    "install": SchedulerRank.install,
    "divide": lambda rank, unowned: rank.staging.divide(unowned),
    "stage": SchedulerRank.stage,
    "status": lambda rank: rank.staging.status(),
    "cancel": lambda rank: rank.staging.cancel(),
    "commit": SchedulerRank.commit,
    "sleep": SchedulerRank.sleep,
    "wake": SchedulerRank.wake,
    "rename": SchedulerRank.rename,
    "live_digest": lambda rank: rank.staging.live_digest(),
    "occupancy": lambda rank: occupancy_of(rank.scheduler),
    "abort": lambda rank, names: abort_requests(rank.scheduler, names),
    "profile": lambda rank, file, steps: rank.profile.begin_or_end(file, rank.number, steps),
    "pause": SchedulerRank.pause,
    "resume": SchedulerRank.resume,
}
"""Methods that the engine's process may call."""

_ranks: list[SchedulerRank] = []
"""This process's rank after its scheduler was created; at most one."""


def _create_rank(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Create this process's rank after `Scheduler.__init__`: model loaded, graphs captured."""
    if not torch.cuda.is_available():
        attend_to_latents()
    _ranks[:] = [SchedulerRank(scheduler)]


def _add_calls(requests: list[Any] | None, receiver: Any) -> list[Any] | None:
    """Append pending calls to the requests that rank 0 has pulled; SGLang broadcasts both."""
    if requests is None or not _ranks:
        return None
    return [*requests, *_ranks[0].pull()]


def _run_calls(process: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Handle requests as SGLang does, then run the calls that arrived with them.

    Requests get their prefix key here, because a commit may have happened since they were sent.
    """
    for request in requests:
        if _ranks and hasattr(request, "extra_key"):
            request.extra_key = _ranks[0].prefixes
    result = process(scheduler, [request for request in requests if not isinstance(request, RankCall)])
    for request in requests:
        if isinstance(request, RankCall):
            _ranks[0].run(request)
    if _ranks and not requests:
        _ranks[0].wait_idle()
    return result


def _separate(result: None, request: Any) -> None:
    """Set the prefix key of a request that SGLang requeues; versions may have changed since its start."""
    if _ranks:
        _ranks[0].separate(request)


def _sample(forward: Callable[..., Any], sampler: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Run SGLang's sampler, record the live version with the tokens, and count the step for profiling."""
    tokens = sample_with_dropped_tokens_masked(forward, sampler, output, *args, **kwargs)
    if _ranks:
        record_version(output, _ranks[0].weights.served.version)
        _ranks[0].profile.step_ended()
    return tokens


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{SCHEDULER}.Scheduler.__init__": ("after", _create_rank),
    "sglang.srt.model_loader.loader._initialize_model": ("after", remember),
    f"{SCHEDULER}.Scheduler.process_input_requests": ("around", _run_calls),
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs": (
        "after",
        _add_calls,
    ),
    "sglang.srt.layers.sampler.Sampler.forward": ("around", _sample),
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract": ("after", _separate),
}
"""SGLang's function -> (kind of hook, hook)."""


def _wait_for_kernels() -> None:
    """Wait for the last step's kernels, which may still run on SGLang's streams."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _is_available(target: str) -> bool:
    """Return whether SGLang has `target` and has installed its hook, if any."""
    with suppress(ImportError, AttributeError):
        found = pkgutil.resolve_name(target)
        return target not in HOOKS or hasattr(found, "__wrapped__")
    return False


def occupancy_of(scheduler: Any) -> tuple[int, float | None]:
    """Return (running requests, used fraction of the KV cache); call between two steps.

    The fraction is None if this SGLang does not report it.
    """
    # prefilled requests join the running batch at the start of the next step
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    running = {request.rid for batch in batches for request in batch.reqs if not request.finished()}
    if not hasattr(scheduler, "pool_stats_observer"):
        return len(running), None
    _, use = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
    return len(running), min(max(float(use), 0.0), 1.0)


def abort_requests(scheduler: Any, names: Sequence[str]) -> None:
    """Abort requests in all queues; call between two steps.

    SGLang's server answers them with the tokens generated so far.
    """
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    waiting = [request for request in scheduler.waiting_queue if request.rid in names and request.output_ids]
    for request in waiting:
        scheduler.waiting_queue.remove(request)
        request.to_finish = FINISH_ABORT()
        request.update_finish_state()
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    left = set(names) - {request.rid for request in waiting}
    request = scheduler.chunked_req
    if request is not None and request.rid in left and request.output_ids:
        request.to_finish = FINISH_ABORT()  # takes effect with the next token, after the last chunk
        left.remove(request.rid)
    for name in sorted(left):
        scheduler.abort_request(AbortReq(rid=name))
