"""Our part inside SGLang's processes: stage, commit, spans, log-probabilities as sampled.

SGLang loads `load` through the entry point group `sglang.srt.plugins` in each of its processes; `sglang_start.py` puts the entry point
where it is found. Calls arrive on a socket of rank 0 and travel with the requests that SGLang gives all ranks at the top of their loops:
there no forward pass is under way (the overlapping scheduler is off), and every rank stands between the same two steps. Which version
sampled a token is SGLang's own record (`weight_versions`), which is exact at that place.
"""

import inspect
import os
import pkgutil
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.messages import WeightManifest
from rollout.engines.owner import follow_owner
from rollout.engines.rank_calls import Call, CallServer, socket_path
from rollout.engines.sampling import kept_tokens
from rollout.engines.share import Share
from rollout.engines.tracing import trace

DIRECTORY = "TETHER_ENGINE_DIR"
"""Environment: where the ranks' sockets are, a directory of this engine alone."""
SCHEDULER = "sglang.srt.managers.scheduler"


def load() -> None:
    """Called by SGLang in every process. In one that is not an engine of ours it does nothing."""
    if not follow_owner(_end) or SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, HookType(kind))


def _end(owner: int) -> None:
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """One rank's scheduler, its share of the weights, and the calls it was given."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._share: Share | None = None
        self._recompute = False
        self._arrived: deque[Call] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._wake, select.POLLIN)
        # a completion ends where its own request says, not at the model's end-of-text token
        scheduler.model_config.hf_eos_token_id = set()
        number = torch.distributed.get_rank()
        self._server = CallServer(socket_path(Path(os.environ[DIRECTORY]), number), self._arrive)

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

    def install(self, shapes: dict[str, list[int]], architecture: str, recompute: bool, staging_mb: int) -> dict[str, Any]:
        """Trace the loader and calibrate. Returns {"bytes"}."""
        missing = [target for target in HOOKS if not _is_hooked(target)]
        if missing:
            raise NotImplementedError(f"this SGLang has no {', '.join(missing)} as tether needs it; 0.5.23 has")
        runner = self._scheduler.tp_worker.model_runner
        named = runner.model.named_parameters(remove_duplicate=False)
        plan = trace(runner.model.load_weights, named, {name: tuple(shape) for name, shape in shapes.items()}, runner.dtype, staging_mb)
        tied = bool(getattr(self._scheduler.model_config.hf_text_config, "tie_word_embeddings", False))
        self._share = Share(plan, architecture=architecture, tied=tied)
        self._recompute = recompute
        with suppress(AttributeError, FileNotFoundError):  # both of its users hold it open; nobody would remove it
            os.unlink(self._scheduler.load_snapshot_writer.path)
        return {"bytes": self._share.bytes}

    def stage(self, manifest: bytes, deadline_s: float) -> dict[str, Any]:
        """Begin to stage in the background."""
        return self.share.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def commit(self, manifest: bytes) -> dict[str, Any]:
        """Make what is staged live; the KV cache of running requests is dropped if it is to be computed again."""
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        start = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step's kernels may still run, on SGLang's own streams
        found = self.share.commit(decoded)
        if found["applied"]:
            self._scheduler.record_weight_version_change(str(decoded.version))
            if self._recompute and not self._drop_kv():
                found |= {"poisoned": True, "error": "the new weights are live, but the KV cache of the old ones could not be dropped"}
            found["copy_ms"] = (time.perf_counter() - start) * 1e3
        return found

    def rename(self, version: int) -> None:
        """Tokens from the next step on count as of `version`."""
        self._scheduler.record_weight_version_change(str(version))

    def abort(self, names: list[str]) -> None:
        """End requests; SGLang's server answers them with what there is."""
        from sglang.srt.managers.io_struct import AbortReq

        for name in names:
            self._scheduler.abort_request(AbortReq(rid=name))

    def pause(self) -> None:
        """Stop between two steps."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))

    def resume(self) -> None:
        """Go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    @property
    def share(self) -> Share:
        """This rank's share of the weights."""
        assert self._share is not None, "install comes first"
        return self._share

    def _drop_kv(self) -> bool:
        """Put running requests back into the queue, with their tokens, and empty the cache."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        paused = self._scheduler._engine_paused
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        dropped = self._scheduler.flush_cache(empty_cache=False)
        if not paused:
            self.resume()
        return bool(dropped)

    def _arrive(self, call: Call) -> None:
        self._arrived.append(call)
        os.eventfd_write(self._wake, 1)


METHODS: dict[str, Callable[..., Any]] = {
    "install": Rank.install,
    "stage": Rank.stage,
    "status": lambda rank: rank.share.status(),
    "cancel": lambda rank: rank.share.cancel(),
    "commit": Rank.commit,
    "rename": Rank.rename,
    "live_digest": lambda rank: rank.share.live_digest(),
    "abort": Rank.abort,
    "pause": Rank.pause,
    "resume": Rank.resume,
}
"""What the engine's process may call."""

_ranks: list[Rank] = []
"""This process's rank, once its scheduler is there."""


def _began(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: the model is loaded, and its graphs are captured."""
    _ranks[:] = [Rank(scheduler)]


def _with_calls(requests: list[Any] | None, receiver: Any) -> list[Any] | None:
    """After rank 0 has pulled what SGLang's tokenizer process sent: add our calls; SGLang passes all of it to the other ranks."""
    if requests is None or not _ranks:
        return None
    return [*requests, *_ranks[0].pull()]


def _carried_out(process: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Around the handling of what was received: our calls come after the requests they arrived with."""
    found = process(scheduler, [request for request in requests if not isinstance(request, Call)])
    for request in requests:
        if isinstance(request, Call):
            _ranks[0].run(request)
    return found


def _as_sampled(forward: Callable[..., Any], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the sampler, where top-k or top-p is asked for: SGLang's log-probabilities would leave both out.

    The tokens that cannot be sampled are taken out of the logits first, and what SGLang samples from and reports is the rest. Greedy rows
    (top_k 1 in SGLang) keep the log-probabilities of the whole distribution.
    """
    if info.is_all_greedy or not (info.need_top_k_sampling or info.need_top_p_sampling):
        return forward(sampler, output, info, *args, **kwargs)
    logits = output.next_token_logits
    greedy = (info.top_ks == 1).unsqueeze(-1)
    kept = kept_tokens(logits.float() / info.temperatures, info.top_ks, info.top_ps)
    kept = torch.where(greedy, torch.zeros_like(kept).scatter(-1, logits.argmax(-1, keepdim=True), True), kept)
    output.next_token_logits = logits.masked_fill(~kept, -torch.inf)
    wanted = torch.where(greedy, logits, output.next_token_logits)
    asked = info.need_top_k_sampling, info.need_top_p_sampling
    info.need_top_k_sampling = info.need_top_p_sampling = False
    try:
        return forward(sampler, output, info, *args, logprob_logits=wanted, **kwargs)
    finally:
        info.need_top_k_sampling, info.need_top_p_sampling = asked


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{SCHEDULER}.Scheduler.__init__": ("after", _began),
    f"{SCHEDULER}.Scheduler.process_input_requests": ("around", _carried_out),
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs": ("after", _with_calls),
    "sglang.srt.layers.sampler.Sampler.forward": ("around", _as_sampled),
}
"""What of SGLang is wrapped, and how."""
NEEDED = {"sglang.srt.layers.sampler.Sampler.forward": "logprob_logits"}
"""Parameters that a wrapped function must have."""


def _is_hooked(target: str) -> bool:
    function = pkgutil.resolve_name(target)
    parameters = inspect.signature(function).parameters  # of what is wrapped
    return hasattr(function, "__wrapped__") and NEEDED.get(target, "self") in parameters
