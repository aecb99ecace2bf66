"""Stages, commits and records token versions inside vLLM's workers.

vLLM gets `WorkerExtension` as `worker_extension_cls` and calls its methods through `collective_rpc`. These
calls run between two steps, in the model's thread, at the same step on all ranks. Staging runs in its own
thread and is requested over each rank's socket, so staging and steps do not block each other.

Importing this module in a worker ties the worker's life to the process that started the engine, and on CPU
keeps vLLM from repacking weights. Both must happen before the model is loaded. This must therefore be the
first module of this project that vLLM imports.
"""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.device.profiles import StepProfile
from protocol.device.shared_layout import ROTARY, rank_file
from protocol.errors import EngineError, EngineSettingsError
from protocol.messages import WeightManifest
from protocol.weights.draft_head import has_head
from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.processed_layers import plan_of
from rollout.engines.multi_process.rank_rpc import RankCall, RankRpcServer, socket_path
from rollout.engines.multi_process.shared_rank import SharedRankPlan, traced_slices
from rollout.engines.vllm.drafts.drafter import HeadedModel, own_tensors, prepare_drafts
from rollout.engines.vllm.layers.plain import keep_weights_plain, rotate_heads_natively
from rollout.engines.vllm.layers.processed import load_biased_experts, vllm_processings
from rollout.engines.vllm.lora import trace_adapter
from rollout.engines.vllm.rank_answers import Answer
from rollout.engines.vllm.step_records import StepResult
from rollout.staging.loaded_weights import check_loaded
from rollout.staging.loader_trace import LoaderTrace, record
from rollout.staging.places import StagingRoom
from rollout.staging.rank import RankStaging
from rollout.staging.shared_weights import SharedPlan, describe, share_parameters
from rollout.staging.staging import digest_of

log = logging.getLogger("tether.rollout")


class WorkerExtension:
    """Mixin of vLLM's worker class, which provides `model_runner` and `vllm_config`.

    It holds this rank's staging (`_tether`), the live version (`_tether_version`), and the step profile
    (`_tether_profile`).
    """

    def tether_install(
        self,
        shapes: dict[str, list[int]],
        architecture: str,
        adapter: bool,
        staging: str,
        staging_mb: int,
        directory: str,
        shared: str,
    ) -> dict[str, Any]:
        """Trace the loader, calibrate, and start recording the scheduler's steps.

        Args:
            shapes: name -> shape of the published tensors of the model or its adapter.
            architecture: class name of the model in transformers, from its config.json.
            adapter: whether versions contain an adapter instead of the model's weights.
            staging, staging_mb: see `EngineConfig`.
            directory: directory in which this rank creates its staging socket.
            shared: file that describes the live weights to a trainer that computes with them; empty: none.

        Returns: {"pid", "parent", "error"}, and without an error {"bytes", "unplaced", "draft"}. "draft" is
        the digest of draft tensors that no version changes, or None.
        """
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        try:
            if shared:
                self._tether = _shared_staging(self, sizes, architecture, Path(shared))
            else:
                self._tether = _staging(self, sizes, architecture, adapter, StagingRoom(staging, staging_mb))
            self._tether_version, self._tether_profile = -1, StepProfile()
            _profile_steps(self.model_runner, self._tether_profile)  # type: ignore[attr-defined]
            _mark_results(self.model_runner, lambda: self._tether_version)  # type: ignore[attr-defined]
            prepare_drafts(self.model_runner)  # type: ignore[attr-defined]
            draft = own_tensors(self.model_runner)  # type: ignore[attr-defined]
            path = socket_path(Path(directory), self.rank)  # type: ignore[attr-defined]
            self._tether_server = RankRpcServer(path, self._tether_called)
        except (EngineError, RuntimeError, KeyError, ValueError, AssertionError) as error:
            return {"pid": os.getpid(), "parent": os.getppid(), "error": f"{type(error).__name__}: {error}"}
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "error": "",
            "bytes": self._tether.bytes,
            "unplaced": self._tether.unplaced,
            "draft": digest_of(draft) if draft and not has_head(sizes) else None,
        }

    def _tether_called(self, call: RankCall) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "stage": self._tether_stage,
            "status": self._tether.status,
            "cancel": self._tether.cancel,
        }
        self._tether_server.carry_out(call, methods[call.method])

    def _tether_stage(self, manifest: bytes, deadline_s: float) -> str:
        return self._tether.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def tether_call(self, number: int, method: str, arguments: Sequence[Any]) -> Answer:
        """Return a method's answer to a numbered call.

        It never raises: the other ranks' answers would then be taken for those of the next call.
        """
        try:
            return number, "", getattr(self, f"tether_{method}")(*arguments)
        except Exception as error:
            log.exception("engine.call_failed method=%s", method)
            return number, f"{type(error).__name__}: {error}", None

    def tether_divide(self, unowned: Sequence[str]) -> None:
        """Accept versions with tensors for other ranks, see `RankStaging.divide`."""
        self._tether.divide(unowned)

    def tether_commit(self, manifest: bytes) -> dict[str, Any]:
        """Copy the staged version over the live weights; tokens of later steps have this version.

        Returns: a `RankCommit` as plain values, which vLLM can serialize.
        """
        decoded = msgspec.msgpack.decode(manifest, type=WeightManifest)
        result = self._tether.commit(decoded)
        if result.applied:
            self._tether_version = decoded.version
        return msgspec.to_builtins(result)

    def tether_rename(self, version: int) -> None:
        """Record tokens of later steps under `version`."""
        self._tether_version = version

    def tether_profile(self, file: str, steps: int) -> None:
        """Profile the next steps of this rank, see `Engine.profile`."""
        self._tether_profile.begin_or_end(file, self.rank, steps)  # type: ignore[attr-defined]

    def tether_sleep(self, level: int) -> str:
        """Release the memory of the staging copy and of vLLM; return the reason of a refusal, or "".

        vLLM's level 2 discards the weights; level 1 keeps them in host memory.
        """
        refusal = self._tether.sleep()
        if not refusal:
            self.sleep(level)  # type: ignore[attr-defined]
        return refusal

    def tether_wake(self) -> str:
        """Reallocate the memory; the next commit provides the weights. Return why it failed, or ""."""
        self.wake_up(None)  # type: ignore[attr-defined]
        return self._tether.wake()

    def tether_live_digest(self) -> tuple[bool, int]:
        """Return (whether this rank holds all live weights, digest of the weights it holds)."""
        return self._tether.live_digest()


def _staging(
    worker: Any, shapes: dict[str, tuple[int, ...]], architecture: str, adapter: bool, room: StagingRoom
) -> RankStaging:
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    config = worker.vllm_config.model_config
    if adapter:
        return RankStaging(
            trace_adapter(worker.model_runner, shapes, config.dtype, room.mb),
            architecture=architecture,
            tied=False,
        )
    with set_current_vllm_config(worker.vllm_config):
        plan = plan_of(
            HeadedModel(worker.model_runner) if has_head(shapes) else model,
            lambda differing: vllm_processings(model, worker.vllm_config, differing),
            shapes,
            config.dtype,
            room,
            Path(config.model),
        )
    return RankStaging(
        plan,
        architecture=architecture,
        tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
    )


def _shared_staging(
    worker: Any, shapes: dict[str, tuple[int, ...]], architecture: str, path: Path
) -> RankStaging:
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    config = worker.vllm_config.model_config
    shared, buffers = share_parameters(
        model, {name: tensor for name, tensor in model.named_buffers() if name.endswith(ROTARY)}
    )
    worker._tether_shared = shared  # keep the memory mapped
    with set_current_vllm_config(worker.vllm_config):
        if processed := vllm_processings(model, worker.vllm_config, ()):
            raise EngineSettingsError(
                f"layer {processed[0].name} computes with tensors that vLLM makes after loading, which no "
                "commit from masters would change: weights.transport 'shared' cannot serve this model"
            )
        recorded = record(
            model.load_weights, model.named_parameters(remove_duplicate=False), shapes, config.dtype
        )
    plan: SharedPlan | SharedRankPlan
    if worker.vllm_config.parallel_config.tensor_parallel_size > 1:
        trace = LoaderTrace(*recorded)
        plan = SharedRankPlan(traced_slices(trace, shapes), worker.rank)
        views = plan.live
    else:
        trace = plan = SharedPlan(*recorded)
        views = plan.views()
    check_loaded(trace, Path(config.model))
    staging = RankStaging(
        plan,
        architecture=architecture,
        tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
    )
    describe(shared, rank_file(path, worker.rank), views, buffers)
    return staging


def _profile_steps(runner: Any, profile: StepProfile) -> None:
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            profile.step_begins()
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model


def _mark_results(runner: Any, live: Callable[[], int]) -> None:
    """Attach the sampling version to the results of vLLM's model runner.

    A step is launched by `execute_model` and `sample_tokens` between two extension calls. Its tokens
    therefore have the version that is live at this time. This also holds if the scheduler runs a step ahead
    and fetches the result after the next step or a commit was launched.
    """
    if not hasattr(runner, "sample_tokens"):
        raise EngineSettingsError(
            "this vLLM's model runner has no sample_tokens: the versions of tokens cannot be recorded"
        )
    sample = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output, version = sample(*args, **kwargs), live()
        if hasattr(output, "get_output"):  # asynchronous scheduling fetches the result later
            wait = output.get_output
            output.get_output = lambda: StepResult.take(wait(), version)
            return output
        return StepResult.take(output, version)

    runner.sample_tokens = sample_tokens


def _end_after(owner: int, engine: int) -> None:
    """End this process and its parent, vLLM's engine process."""
    if engine != owner and engine == os.getppid():
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


_ENGINE = os.getppid()
if exit_with_parent(lambda owner: _end_after(owner, _ENGINE)):
    load_biased_experts()
    if not torch.cuda.is_available():
        keep_weights_plain()
        rotate_heads_natively()
