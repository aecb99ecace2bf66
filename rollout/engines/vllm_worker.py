"""Our part inside vLLM's workers: trace, stage, commit, spans. Given to vLLM as `worker_extension_cls`, called by `collective_rpc`.

A call runs between two steps, in the thread that runs the model, on all ranks at the same step. Staging has a thread of its own.
Importing this module in a worker ties the worker's life to the process that started the engine, and on a CPU keeps vLLM from repacking
linear layers: both must happen before the model is loaded, and vLLM imports this module first of all of ours.
"""

import os
import select
import signal
import threading
import time
from typing import Any

import msgspec
import torch

from protocol.errors import EngineError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.marks import Marks
from rollout.engines.staging import Staging, digest_of
from rollout.engines.tracing import Plan, trace

OWNER = "TETHER_ENGINE_OWNER"
"""Environment: pid of the process whose engine this is; when it ends, so does the worker."""


class WorkerExtension:
    """Mixed into vLLM's worker class, next to `model_runner` and `vllm_config`. Everything it keeps is in one `_Share`."""

    def tether_install(self, shapes: dict[str, list[int]], architecture: str) -> dict[str, Any]:
        """Trace the loader, calibrate, and watch the scheduler's steps from now on. Returns {"pid", "error"}."""
        try:
            self._tether = _Share(self, {name: tuple(shape) for name, shape in shapes.items()}, architecture)
        except (EngineError, RuntimeError, KeyError, ValueError, AssertionError, NotImplementedError) as error:
            return {"pid": os.getpid(), "parent": os.getppid(), "error": f"{type(error).__name__}: {error}"}
        return {"pid": os.getpid(), "parent": os.getppid(), "error": "", "bytes": self._tether.bytes}

    def tether_stage(self, manifest: bytes, deadline_s: float) -> dict[str, Any]:
        """Begin to stage in the background; `tether_status` tells how it goes."""
        return self._tether.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def tether_status(self) -> dict[str, Any]:
        """What is staged or being staged: {"state", "epoch", "version", "digest", "covered", "error", "poisoned"}."""
        return self._tether.status()

    def tether_cancel(self) -> dict[str, Any]:
        """Make a running fetch end, or forget what is staged."""
        return self._tether.cancel()

    def tether_commit(self, manifest: bytes) -> dict[str, Any]:
        """Make what is staged live. Returns {"applied", "copy_ms", "error", "poisoned"}."""
        return self._tether.commit(msgspec.msgpack.decode(manifest, type=WeightManifest))

    def tether_rename(self, version: int) -> None:
        """Tokens from the next step on count as of `version`."""
        self._tether.marks.switch(version)

    def tether_marks(self, request_id: str) -> list[tuple[int, int]]:
        """Marks (first token, version) of a request."""
        return self._tether.marks.of(request_id)

    def tether_live_digest(self) -> tuple[bool, int]:
        """Digest of the live weights by checkpoint name, or if this rank has only a part of them by parameter."""
        return self._tether.live_digest()


class _Share:
    """One rank's share of the weights: the plan, the staging copy, its thread, and the marks."""

    def __init__(self, worker: Any, shapes: dict[str, tuple[int, ...]], architecture: str) -> None:
        from vllm.config import set_current_vllm_config

        runner = worker.model_runner
        model = runner.get_model()
        dtype = worker.vllm_config.model_config.dtype
        with set_current_vllm_config(worker.vllm_config):
            self._plan: Plan = trace(model.load_weights, model.named_parameters(remove_duplicate=False), shapes, dtype)
        self._plan.calibrate()
        tied = bool(getattr(worker.vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
        self._staging = Staging(self._plan.sources(), architecture=architecture, tied=tied)
        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda else -1
        self._state = "idle"
        self._error = ""
        self._covered = 0
        self._poisoned = False
        self._thread: threading.Thread | None = None
        self.bytes = sum(tensor.nbytes for tensor in self._plan.live.values())
        self.marks = Marks(-1)
        self._watch(runner)

    def stage(self, manifest: WeightManifest, deadline_s: float) -> dict[str, Any]:
        if self._thread is not None and self._thread.is_alive():
            return {"error": "another version is being staged"}
        self._state, self._error, self._covered = "staging", "", 0
        self._thread = threading.Thread(target=self._fetch, args=(manifest, deadline_s), name="tether-stage", daemon=True)
        self._thread.start()
        return {"error": ""}

    def status(self) -> dict[str, Any]:
        staged = self._staging.staged if self._state == "staged" else None
        found: dict[str, Any] = {"state": self._state, "error": self._error, "covered": self._covered, "poisoned": self._poisoned}
        if staged is not None:
            found |= {"epoch": staged.epoch, "version": staged.version, "digest": staged.digest}
        return found

    def cancel(self) -> dict[str, Any]:
        if self._state == "staging":
            self._staging.cancel()
        elif self._state == "staged":
            self._staging.discard()
            self._state = "idle"
        return self.status()

    def commit(self, manifest: WeightManifest) -> dict[str, Any]:
        start = time.perf_counter()
        if self._poisoned or self._state != "staged":
            return {"applied": False, "error": f"the rank is {'poisoned' if self._poisoned else self._state}", "poisoned": self._poisoned}
        try:
            self._staging.take(manifest)
        except WeightError as error:
            return {"applied": False, "error": str(error), "poisoned": False}
        self._state = "idle"
        self._poisoned = True
        try:
            self._plan.apply()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            return {"applied": False, "error": str(error), "poisoned": True}
        self._poisoned = False
        self.marks.switch(manifest.version)
        return {"applied": True, "error": "", "poisoned": False, "copy_ms": (time.perf_counter() - start) * 1e3}

    def live_digest(self) -> tuple[bool, int]:
        tensors = {}
        whole = True
        for name, tensor, complete in self._plan.gathered():
            tensors[name] = tensor
            whole = whole and complete
        return whole, digest_of(tensors if whole else self._plan.live)

    def _fetch(self, manifest: WeightManifest, deadline_s: float) -> None:
        try:
            if self._cuda:
                torch.cuda.set_device(self._device)
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    self._covered = self._staging.fetch(manifest, deadline_s)
                stream.synchronize()
            else:
                self._covered = self._staging.fetch(manifest, deadline_s)
        except (WeightError, RuntimeError) as error:
            self._staging.discard()
            self._error, self._state = str(error), "failed"
        else:
            self._state = "staged"

    def _watch(self, runner: Any) -> None:
        from vllm.v1.core.sched.output import CachedRequestData

        if "num_output_tokens" not in CachedRequestData.__dataclass_fields__:
            raise EngineError("this vLLM's scheduler does not say how many tokens a request has: their versions cannot be recorded")
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            cached = scheduler_output.scheduled_cached_reqs
            scheduled = [(_key(new.req_id), _resumed_tokens(new)) for new in scheduler_output.scheduled_new_reqs]
            scheduled += zip(map(_key, cached.req_ids), cached.num_output_tokens, strict=True)
            self.marks.step(scheduled, map(_key, scheduler_output.finished_req_ids))
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model


def _key(request_id: str) -> str:
    """Our own number in front of the id; vLLM appends random characters to it."""
    return request_id.partition(":")[0]


def _resumed_tokens(new: Any) -> int:
    """Tokens that a request has at its first step: some runners send a preempted request as a new one, with them at the end."""
    prefill = getattr(new, "prefill_token_ids", None)
    return max(0, len(prefill) - len(new.prompt_token_ids)) if prefill is not None else 0


def _end_with_owner(owner: int) -> None:
    """End this process, and vLLM's engine process above it, when `owner` ends, however it ends."""
    engine = os.getppid()
    _await_end(owner)
    if engine != owner and engine == os.getppid():
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


def _await_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd here (a sandbox): look every second
        while _exists(pid):
            time.sleep(1)
        return
    select.select([handle], [], [])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _plain_linears() -> None:
    """On a CPU vLLM repacks the weights of linear layers, which then could not be updated in place. Leave them plain."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        utils.dispatch_cpu_unquantized_gemm = dispatch


if os.environ.get(OWNER, "").isdecimal() and int(os.environ[OWNER]) != os.getpid():
    threading.Thread(target=_end_with_owner, args=(int(os.environ[OWNER]),), name="tether-owner", daemon=True).start()
    if not torch.cuda.is_available():
        _plain_linears()
