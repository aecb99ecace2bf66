"""Our part inside vLLM's workers: trace, stage, commit, spans. Given to vLLM as `worker_extension_cls`,
called by `collective_rpc`.

A call runs between two steps, in the thread that runs the model, on all ranks at the same step. Staging has a
thread of its own, and is asked for over a socket of each rank, so that neither it nor the steps wait for each
other. Importing this module in a worker ties the worker's life to the process that started the engine, and on
a CPU keeps vLLM from repacking linear layers: both must happen before the model is loaded, and vLLM imports
this module first of all of ours.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.device.shared_layout import ROTARY
from protocol.errors import EngineError
from protocol.messages import WeightManifest
from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.rank_rpc import Call, RankRpcServer, socket_path
from rollout.engines.multi_process.token_versions import TokenVersions
from rollout.engines.vllm.lora import trace_adapter
from rollout.staging.loader_trace import record, trace
from rollout.staging.rank import RankStaging
from rollout.staging.shared_weights import SharedPlan, describe, share_parameters


class WorkerExtension:
    """Mixed into vLLM's worker class, next to `model_runner` and `vllm_config`. It keeps its share of the
    weights, and the marks."""

    def tether_install(
        self,
        shapes: dict[str, list[int]],
        architecture: str,
        adapter: bool,
        staging_mb: int,
        directory: str,
        shared: str,
    ) -> dict[str, Any]:
        """Trace the loader, calibrate, and watch the scheduler's steps from now on. Returns {"pid", "parent",
        "error"}.

        Args:
            shapes: of what is published: the model's tensors, or those of its `adapter`.
            staging_mb: see `EngineConfig`.
            directory: where this rank's socket is made, over which it is asked to stage.
            shared: file that describes the live weights to a trainer that computes with them; empty:
                there is none.
        """
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        try:
            if shared:
                self._tether = _shared(self, sizes, architecture, Path(shared))
            else:
                self._tether = _share(self, sizes, architecture, adapter, staging_mb)
            self._tether_marks = TokenVersions(-1)
            _watch(self.model_runner, self._tether_marks)  # type: ignore[attr-defined]
            self._tether_server = RankRpcServer(socket_path(Path(directory), self.rank), self._tether_asked)  # type: ignore[attr-defined]
        except (
            EngineError,
            RuntimeError,
            KeyError,
            ValueError,
            AssertionError,
            NotImplementedError,
        ) as error:
            return {"pid": os.getpid(), "parent": os.getppid(), "error": f"{type(error).__name__}: {error}"}
        return {"pid": os.getpid(), "parent": os.getppid(), "error": "", "bytes": self._tether.bytes}

    def _tether_asked(self, call: Call) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "stage": self._tether_stage,
            "status": self._tether.status,
            "cancel": self._tether.cancel,
        }
        self._tether_server.carry_out(call, methods[call.method])

    def _tether_stage(self, manifest: bytes, deadline_s: float) -> dict[str, Any]:
        return self._tether.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def tether_commit(self, manifest: bytes) -> dict[str, Any]:
        """Make what is staged live. Tokens from the next step on count as of its version."""
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        found = self._tether.commit(decoded)
        if found["applied"]:
            self._tether_marks.switch(decoded.version)
        return found

    def tether_rename(self, version: int) -> None:
        """Tokens from the next step on count as of `version`."""
        self._tether_marks.switch(version)

    def tether_marks(self, request_id: str) -> list[tuple[int, int]]:
        """Marks (first token, version) of a request."""
        return self._tether_marks.of(request_id)

    def tether_sleep(self, level: int) -> dict[str, Any]:
        """Give back the staging copy's memory and vLLM's own: level 2 discards the weights, level 1 keeps
        them in host memory."""
        found = self._tether.sleep()
        if not found["error"]:
            self.sleep(level)  # type: ignore[attr-defined]
        return found

    def tether_wake(self) -> dict[str, Any]:
        """Take it all again; the live weights come with the next commit."""
        self.wake_up(None)  # type: ignore[attr-defined]
        return self._tether.wake()

    def tether_live_digest(self) -> tuple[bool, int]:
        """Digest of the live weights by checkpoint name, or if this rank has only a part of them by
        parameter."""
        return self._tether.live_digest()


def _share(
    worker: Any, shapes: dict[str, tuple[int, ...]], architecture: str, adapter: bool, staging_mb: int
) -> RankStaging:
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    config = worker.vllm_config.model_config
    if adapter:
        return RankStaging(
            trace_adapter(worker.model_runner, shapes, config.dtype, staging_mb),
            architecture=architecture,
            tied=False,
        )
    with set_current_vllm_config(worker.vllm_config):
        plan = trace(
            model.load_weights,
            model.named_parameters(remove_duplicate=False),
            shapes,
            config.dtype,
            staging_mb,
        )
    return RankStaging(
        plan,
        architecture=architecture,
        tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
    )


def _shared(worker: Any, shapes: dict[str, tuple[int, ...]], architecture: str, path: Path) -> RankStaging:
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    config = worker.vllm_config.model_config
    room, buffers = share_parameters(
        model, {name: tensor for name, tensor in model.named_buffers() if name.endswith(ROTARY)}
    )
    worker._tether_room = room
    with set_current_vllm_config(worker.vllm_config):
        plan = SharedPlan(
            *record(model.load_weights, model.named_parameters(remove_duplicate=False), shapes, config.dtype)
        )
    share = RankStaging(
        plan,
        architecture=architecture,
        tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
    )
    describe(room, path, plan.views(), buffers)
    return share


def _watch(runner: Any, marks: TokenVersions) -> None:
    from vllm.v1.core.sched.output import CachedRequestData

    if "num_output_tokens" not in CachedRequestData.__dataclass_fields__:
        raise EngineError(
            "this vLLM's scheduler does not say how many tokens a request has: their versions cannot be recorded"
        )
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        scheduled = [(_key(new.req_id), _resumed_tokens(new)) for new in scheduler_output.scheduled_new_reqs]
        scheduled += zip(map(_key, cached.req_ids), cached.num_output_tokens, strict=True)
        marks.step(scheduled, map(_key, scheduler_output.finished_req_ids))
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


def _key(request_id: str) -> str:
    """Our own number in front of the id; vLLM appends random characters to it."""
    return request_id.partition(":")[0]


def _resumed_tokens(new: Any) -> int:
    """Tokens that a request has at its first step: some runners send a preempted request as a new one, with
    them at the end."""
    prefill = getattr(new, "prefill_token_ids", None)
    return max(0, len(prefill) - len(new.prompt_token_ids)) if prefill is not None else 0


def _end_after(owner: int, engine: int) -> None:
    """End this process, and vLLM's engine process above it."""
    if engine != owner and engine == os.getppid():
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


def _plain_linears() -> None:
    """On a CPU vLLM repacks the weights of linear layers, which then could not be updated in place. Leave
    them plain."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        utils.dispatch_cpu_unquantized_gemm = dispatch


_ENGINE = os.getppid()
if exit_with_parent(lambda owner: _end_after(owner, _ENGINE)) and not torch.cuda.is_available():
    _plain_linears()
