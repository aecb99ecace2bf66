"""Our part inside SGLang's processes: stage, commit, sleep, spans.

SGLang loads `load` through the entry point group `sglang.srt.plugins` in each of its processes;
`sglang_start.py` puts the entry point where it is found. Calls arrive on a socket of rank 0 and travel with
the requests that SGLang gives all ranks at the top of their loops: there no forward pass is under way (the
overlapping scheduler is off), and every rank stands between the same two steps.
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

from protocol.messages import WeightManifest
from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.rank_rpc import Call, RankRpcServer, socket_path
from rollout.engines.sglang.lora import trace_adapter
from rollout.engines.sglang.memory import RankMemory, empty_cache
from rollout.engines.sglang.sampling import CARRIER, as_sampled, with_version
from rollout.staging.loader_trace import StagingPlan, trace
from rollout.staging.rank import RankStaging

DIRECTORY = "TETHER_ENGINE_DIR"
"""Environment: where the ranks' sockets are, a directory of this engine alone."""
SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Called by SGLang in every process. In one that is not an engine of ours it does nothing."""
    if not exit_with_parent(_end) or SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, HookType(kind))


def _end(owner: int) -> None:
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has to know of the engine's settings."""

    architecture: str
    adapter: bool
    """Versions bring an adapter, not the model's weights."""
    recompute: bool
    """The KV cache is dropped at a commit."""
    sleeps: bool
    staging_mb: int
    """See `EngineConfig`."""


class SchedulerRank:
    """One rank's scheduler, its share of the weights, and the calls it was given."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.version = -1
        """Of the live weights."""
        self._share: RankStaging | None = None
        self._memory: RankMemory | None = None
        self._recompute = False
        self._is_held = False
        """It was paused."""
        self._is_hollow = False
        """It has slept, and no version was committed since."""
        self._arrived: deque[Call] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._wake, select.POLLIN)
        # a completion ends where its own request says, not at the model's end-of-text token
        scheduler.model_config.hf_eos_token_id = set()
        number = torch.distributed.get_rank()
        self._server = RankRpcServer(socket_path(Path(os.environ[DIRECTORY]), number), self._arrive)

    def pull(self) -> list[Call]:
        """Calls that have arrived since the last time."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        calls = []
        while self._arrived:
            calls.append(self._arrived.popleft())
        return calls

    def run(self, call: Call) -> None:
        """Carry out a call and answer it."""
        self._server.carry_out(call, lambda *arguments: METHODS[call.method](self, *arguments))

    def install(self, shapes: dict[str, list[int]], terms: dict[str, Any]) -> dict[str, Any]:
        """Trace the loader and calibrate. Returns {"bytes"}.

        Args:
            shapes: of the tensors that versions bring.
            terms: `RankSettings` as plain values.
        """
        with suppress(
            AttributeError, FileNotFoundError
        ):  # both of its users hold it open; nobody would remove it
            os.unlink(self.scheduler.load_snapshot_writer.path)
        missing = [target for target in [CARRIER, *HOOKS] if not _is_there(target)]
        if missing:
            raise NotImplementedError(
                f"this SGLang has no {', '.join(missing)} as tether needs it; 0.5.15 and 0.5.23 have"
            )
        given = msgspec.convert(terms, RankSettings)
        plan = self._trace({name: tuple(shape) for name, shape in shapes.items()}, given)
        tied = not given.adapter and bool(
            getattr(self.scheduler.model_config.hf_text_config, "tie_word_embeddings", False)
        )
        self._share = RankStaging(plan, architecture=given.architecture, tied=tied)
        self._memory = RankMemory(self.scheduler, plan.live.values()) if given.sleeps else None
        self._recompute = given.recompute
        return {"bytes": self._share.bytes}

    def stage(self, manifest: bytes, deadline_s: float) -> dict[str, Any]:
        """Begin to stage in the background."""
        return self.share.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def commit(self, manifest: bytes) -> dict[str, Any]:
        """Make what is staged live; the KV cache of running requests is dropped if it is to be computed
        again."""
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        start = time.perf_counter()
        _end_kernels()
        found = self.share.commit(decoded)
        if found["applied"]:
            self.version = decoded.version
            if self._recompute and not self._is_hollow and not self._drop_kv():
                found |= {
                    "poisoned": True,
                    "error": "the new weights are live, but the KV cache of the old ones could not be dropped",
                }
            self._is_hollow = False
            self._resume_scheduler()
            found["copy_ms"] = (time.perf_counter() - start) * 1e3
        return found

    def rename(self, version: int) -> None:
        """Tokens from the next step on count as of `version`."""
        self.version = version

    def sleep(self) -> dict[str, Any]:
        """Put running requests back with their tokens, and give all memory back. No step before the next
        commit. Returns {"error"}."""
        assert self._memory is not None, "the engine was not started to sleep"
        _end_kernels()
        self._is_hollow = True
        if not self._drop_kv():
            return {"error": "the KV cache could not be dropped"}
        found = self.share.sleep()
        if not found["error"]:
            self._memory.give_back()
        return found

    def wake(self) -> dict[str, Any]:
        """Take the memory again; the live weights come with the next commit. Returns {"error"}."""
        assert self._memory is not None, "the engine was not started to sleep"
        self._memory.take_back()
        return self.share.wake()

    def pause(self) -> None:
        """Stop between two steps."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._is_held = True
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))

    def resume(self) -> None:
        """Go on, or if there are no weights at the next commit."""
        self._is_held = False
        self._resume_scheduler()

    def wait_idle(self) -> None:
        """Wait for requests and calls, a second at most: a paused scheduler would look for them all the
        time."""
        if self.scheduler._engine_paused and self.scheduler.idle_sleeper is not None:
            self.scheduler.idle_sleeper.maybe_sleep()

    @property
    def share(self) -> RankStaging:
        """This rank's share of the weights."""
        assert self._share is not None, "install comes first"
        return self._share

    def _trace(self, shapes: dict[str, tuple[int, ...]], terms: RankSettings) -> StagingPlan:
        runner = self.scheduler.tp_worker.model_runner
        if terms.adapter:
            return trace_adapter(runner.lora_manager, shapes, terms.staging_mb)
        return trace(
            runner.model.load_weights,
            runner.model.named_parameters(remove_duplicate=False),
            shapes,
            runner.dtype,
            terms.staging_mb,
        )

    def _drop_kv(self) -> bool:
        """Put running requests back into the queue, with their tokens, and empty the cache."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        dropped = empty_cache(self.scheduler)
        self._resume_scheduler()
        return dropped

    def _resume_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if not (self._is_held or self._is_hollow):
            self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _arrive(self, call: Call) -> None:
        self._arrived.append(call)
        os.eventfd_write(self._wake, 1)


METHODS: dict[str, Callable[..., Any]] = {
    "install": SchedulerRank.install,
    "stage": SchedulerRank.stage,
    "status": lambda rank: rank.share.status(),
    "cancel": lambda rank: rank.share.cancel(),
    "commit": SchedulerRank.commit,
    "sleep": SchedulerRank.sleep,
    "wake": SchedulerRank.wake,
    "rename": SchedulerRank.rename,
    "live_digest": lambda rank: rank.share.live_digest(),
    "abort": lambda rank, names: end_requests(rank.scheduler, names),
    "pause": SchedulerRank.pause,
    "resume": SchedulerRank.resume,
}
"""What the engine's process may call."""

_ranks: list[SchedulerRank] = []
"""This process's rank, once its scheduler is there."""


def _began(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: the model is loaded, and its graphs are captured."""
    _ranks[:] = [SchedulerRank(scheduler)]


def _with_calls(requests: list[Any] | None, receiver: Any) -> list[Any] | None:
    """After rank 0 has pulled what SGLang's tokenizer process sent: add our calls; SGLang passes all of it to
    the other ranks."""
    if requests is None or not _ranks:
        return None
    return [*requests, *_ranks[0].pull()]


def _carried_out(process: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Around the handling of what was received: our calls come after the requests they arrived with."""
    found = process(scheduler, [request for request in requests if not isinstance(request, Call)])
    for request in requests:
        if isinstance(request, Call):
            _ranks[0].run(request)
    if _ranks and not requests:
        _ranks[0].wait_idle()
    return found


def _sampled(forward: Callable[..., Any], sampler: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the sampler, whose tokens are of the live version."""
    tokens = as_sampled(forward, sampler, output, *args, **kwargs)
    if _ranks:
        with_version(output, _ranks[0].version)
    return tokens


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{SCHEDULER}.Scheduler.__init__": ("after", _began),
    f"{SCHEDULER}.Scheduler.process_input_requests": ("around", _carried_out),
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs": (
        "after",
        _with_calls,
    ),
    "sglang.srt.layers.sampler.Sampler.forward": ("around", _sampled),
}
"""What of SGLang is wrapped, and how."""


def _end_kernels() -> None:
    """Those of the last step may still run, on SGLang's own streams."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _is_there(target: str) -> bool:
    """Whether SGLang has it, and where it is to be wrapped has done so."""
    with suppress(ImportError, AttributeError):
        found = pkgutil.resolve_name(target)
        return target not in HOOKS or hasattr(found, "__wrapped__")
    return False


def end_requests(scheduler: Any, names: Sequence[str]) -> None:
    """End requests, wherever they are; SGLang's server answers them with what there is. Called between two
    steps."""
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
        request.to_finish = FINISH_ABORT()  # with the next token, after its last piece
        left.remove(request.rid)
    for name in sorted(left):
        scheduler.abort_request(AbortReq(rid=name))
