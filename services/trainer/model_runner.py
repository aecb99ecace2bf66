"""Runs the model's blocking work in one thread, on a GPU or weights that engines may share."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import TetherError
from protocol.messages import WeightDraft, WeightManifest
from services.runtime.process import Process
from services.runtime.training import build_models
from services.trainer.gpu_turn import TrainerGpuTurn
from services.trainer.shared_engine import AnySharedSender, SharedEngine
from trainer.backends.base import Backend, StepStats
from trainer.backends.early_export import Tensors
from trainer.execution.commands import (
    AttachCommand,
    DigestWeightsCommand,
    DraftCommand,
    FinishSaveCommand,
    IdleCommand,
    OffloadCommand,
    OnloadCommand,
    PublishCommand,
    RankCommand,
    RestoreCommand,
)
from trainer.execution.executor import Executor
from trainer.execution.state_writer import CHECKPOINT, EXPORT
from trainer.roles.models import RankModels
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.registry import make_sender

T = TypeVar("T")

IDLE_S = 60.0
"""Longest silence of rank 0 towards the other ranks, seconds; it bounds their wait."""


class ModelRunner:
    """Asynchronous interface to rank 0: its compute thread, publication, and turns on the GPU."""

    def __init__(
        self,
        models: RankModels,
        sender: WeightSender,
        thread: ThreadPoolExecutor,
        *,
        engine_dtype: str,
        turn: TrainerGpuTurn | None = None,
        shared_engine: SharedEngine | None = None,
    ) -> None:
        """Take over a loaded model.

        Args:
            models: models of rank 0; used only in `thread`.
            sender: publishes the weights.
            thread: executor with one worker, so that torch never blocks the event loop or runs concurrently.
            engine_dtype: dtype of published weights.
            turn: acquires and releases the GPU; None unless the run is colocated.
            shared_engine: engine whose weights the model computes with (transport `shared`).
        """
        self.executor = Executor(models, sender)
        self.sender = sender
        self.shared_engine = shared_engine
        self._thread = thread
        self._engine_dtype = engine_dtype
        self._turn = turn
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._early_publication: Future[WeightManifest] | None = None
        """Manifest of the version whose publication began during the last step."""

    @property
    def device_name(self) -> str:
        """Name of rank 0's GPU; empty for a model on the CPU."""
        return self.executor.models.policy.device_name

    def flops(self, plan: StepPlan, epochs: int) -> float | None:
        """Return the model's FLOPs for a step; None if the backend does not count them.

        Args:
            plan: plan of the step.
            epochs: number of times that the step trains each sample.
        """
        policy = self.executor.models.policy
        shared = plan.shared_tokens(plan.families(shared=policy.shares_prefixes))
        per_epoch = policy.flops(plan.lengths, shared, plan.totals.trained_tokens)
        return None if per_epoch is None else per_epoch * epochs

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run blocking work in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def lead(self, command: RankCommand[T]) -> T:
        """Execute a command on all ranks, from the compute thread."""
        return await self.run(self.executor.lead, command)

    async def idle_loop(self) -> None:
        """Send a heartbeat from rank 0 to the other ranks every `IDLE_S`, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S)
            await self.lead(IdleCommand())

    async def take_device(self) -> None:
        """In a colocated run, acquire the GPU once the engines sleep and move the trainer's state to the GPU.

        Returns at once if the trainer has the GPU.

        Raises:
            TetherError: the engines do not sleep, or the GPU lacks room.
        """
        if self._turn is not None and not self._turn.has_device:
            await self._turn.acquire()
            await self.lead(OnloadCommand())

    async def leave_device(self) -> None:
        """In a colocated run, move the trainer's state to the host, then release the GPU to the engines."""
        if self._turn is not None and self._turn.has_device:
            await self.lead(OffloadCommand())
            await self._turn.release()

    async def wait_for_engine(self, manifest: WeightManifest) -> bool:
        """With transport `shared`, wait until the engine serves a version; False if the process is to stop.

        Args:
            manifest: manifest of the last published version.

        Raises:
            TetherError: the engine has ended, or does not serve the version in time.
        """
        return self.shared_engine is None or await self.shared_engine.ready(
            manifest, lambda path: self.lead(AttachCommand(str(path)))
        )

    async def train(
        self,
        command: TrainCommand,
        *,
        epoch: str = "",
        announce: Callable[[WeightDraft], None] | None = None,
    ) -> tuple[StepPlan, StepStats]:
        """Make one optimizer step; return its plan and its measurements.

        Args:
            command: command of the step.
            epoch: the trainer's epoch; used with `announce`.
            announce: called when engines can receive the new version during the optimizer step. The backend
                then publishes while the optimizer runs, if it can. None leaves publication to `publish`.

        Raises:
            TetherError: the engine whose weights the step computes with has ended during the step.
        """
        self._early_publication = None
        if announce is None:
            return await self.run(self._train, command)
        loop, version = asyncio.get_running_loop(), command.step + 1

        def announce_from_thread(draft: WeightDraft) -> None:
            loop.call_soon_threadsafe(announce, draft)

        def start_publication(tensors: Tensors) -> None:
            self._early_publication = self._publisher.submit(
                self._publish_early, epoch, version, tensors, announce_from_thread
            )

        return await self.run(self._train, command, start_publication)

    async def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Return the draft of a version that engines may receive while `publish` exports the version.

        Returns None if the transport does not allow that, or if the version's publication began in its step.
        """
        if self._early_publication is not None:
            return None
        return await self.lead(DraftCommand(epoch, version))

    async def publish(self, epoch: str, version: int) -> WeightManifest:
        """Export the weights and return their manifest; the version is complete on return."""
        publication, self._early_publication = self._early_publication, None
        if publication is not None:
            return await asyncio.wrap_future(publication)
        return await self.lead(PublishCommand(epoch, version, self._engine_dtype))

    async def digest(self) -> int:
        """Return the digest that the weights would have if published."""
        return await self.lead(DigestWeightsCommand(self._engine_dtype))

    async def restore(self, directory: Path) -> None:
        """Load a checkpoint."""
        if self.shared_engine is not None:
            await self.run(self.shared_engine.invalidate)
        await self.lead(RestoreCommand(str(directory)))

    async def finish_save(self) -> str:
        """Wait until all ranks have written their parts of a checkpoint, concurrently with steps if possible.

        Returns:
            Why an export is incomplete; empty if it is complete.

        Raises:
            TetherError: a rank could not write its part of the checkpoint.
        """
        await asyncio.to_thread(self.executor.await_part)
        if self.executor.has_followers:  # ranks execute commands one at a time
            failure = await self.lead(FinishSaveCommand())
        else:
            failure = await asyncio.to_thread(self.executor.lead, FinishSaveCommand())
        if CHECKPOINT in failure:
            raise TetherError(failure[CHECKPOINT])
        return failure.get(EXPORT, "")

    async def close(self) -> None:
        """Close sender, model and threads."""
        await asyncio.to_thread(self._publisher.shutdown)  # a running export ends with its step
        self.sender.close()
        await self.run(self.executor.close)
        self._thread.shutdown()

    def _train(
        self, command: TrainCommand, start_publication: Callable[[Tensors], None] | None = None
    ) -> tuple[StepPlan, StepStats]:
        if self.shared_engine is not None:
            self.shared_engine.invalidate()
        result = self.executor.train(command, start_publication)
        if self.shared_engine is not None:
            self.shared_engine.check()
        return result

    def _publish_early(
        self, epoch: str, version: int, tensors: Tensors, announce: Callable[[WeightDraft], None]
    ) -> WeightManifest:
        if draft := self.sender.provisional(epoch, version):
            announce(draft)
        converted = in_dtype(tensors, self._engine_dtype)
        base_model = self.executor.models.policy.architecture
        return self.sender.publish(epoch, version, converted, base_model=base_model)


def _open_sender(process: Process, backend: Backend) -> WeightSender:
    settings = process.settings
    sender = make_sender(
        settings.weights,
        backend,
        settings.engine.dtype,
        run=process.run,
        run_dir=settings.run_dir,
        curve_dir=settings.bus.curve_dir,
    )
    assert sender is not None  # rank 0 has one
    return sender


async def load_model(process: Process, turn: TrainerGpuTurn | None) -> ModelRunner:
    """Load rank 0's models and open its sender, in the compute thread.

    Raises:
        SettingsError: the settings do not allow the model to be loaded or the transport to be used.
        WeightError: the sender cannot be set up.
    """
    settings, loop = process.settings, asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
    with process.waiting("model load"):
        models = await loop.run_in_executor(thread, build_models, settings)
        await process.ready("model")
    sender = await loop.run_in_executor(thread, _open_sender, process, models.policy)
    shared_engine = None
    if settings.weights.transport == TRANSPORT:
        masters = sender if isinstance(sender, AnySharedSender) else None
        shared_engine = SharedEngine(process, masters, settings.weights.timeout_s)
    return ModelRunner(
        models,
        sender,
        thread,
        engine_dtype=settings.engine.dtype,
        turn=turn,
        shared_engine=shared_engine,
    )
