"""Runs the model's blocking work in one thread, on a device or weights that it may share with engines."""

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
"""The other ranks hear from rank 0 at least this often, so that their wait is bounded."""


class ModelRunner:
    """Rank 0 as the event loop uses it: the thread of its work, publication, and turns on the GPU."""

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
            models: rank 0's parts; used in `thread` only.
            sender: publishes the weights.
            thread: of one worker, so torch work never blocks the loop, and never runs twice at once.
            engine_dtype: dtype in which weights are published.
            turn: of a colocated run: takes and leaves the GPU.
            shared_engine: with transport `shared`: the engine whose weights the model computes with.
        """
        self.executor = Executor(models, sender)
        self.sender = sender
        self.shared_engine = shared_engine
        self._thread = thread
        self._engine_dtype = engine_dtype
        self._turn = turn
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._ahead: Future[WeightManifest] | None = None
        """The version that the last step began to publish."""

    @property
    def device_name(self) -> str:
        """Name of rank 0's GPU; empty where the model is on a CPU."""
        return self.executor.models.policy.device_name

    def flops(self, plan: StepPlan, epochs: int) -> float | None:
        """Return the FLOPs that the model needs for a step, if the backend counts them.

        Args:
            plan: the step's plan.
            epochs: times that it trains each sample.
        """
        policy = self.executor.models.policy
        shared = plan.shared_tokens(plan.families(shared=policy.shares_prefixes))
        once = policy.flops(plan.lengths, shared, plan.totals.trained_tokens)
        return None if once is None else once * epochs

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run blocking work in the model's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def lead(self, command: RankCommand[T]) -> T:
        """Carry out a command on all ranks, in the model's thread."""
        return await self.run(self.executor.lead, command)

    async def idle_loop(self) -> None:
        """Let the other ranks know that rank 0 lives, in all its waits, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S)
            await self.lead(IdleCommand())

    async def take_device(self) -> None:
        """In a colocated run, have the engines sleep and move the trainer's state back to the GPU.

        Returns at once if it is there.

        Raises:
            TetherError: the engines do not sleep, or there is no room.
        """
        if self._turn is not None and not self._turn.mine:
            await self._turn.acquire()
            await self.lead(OnloadCommand())

    async def leave_device(self) -> None:
        """In a colocated run, move the trainer's state to the host, and only then let the engines wake."""
        if self._turn is not None and self._turn.mine:
            await self.lead(OffloadCommand())
            await self._turn.release()

    async def engine_ready(self, manifest: WeightManifest) -> bool:
        """With transport `shared`, wait until the engine serves a version; false if the process is to stop.

        Args:
            manifest: the last published version's.

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
            command: the step's command.
            epoch: of the trainer, with `announce`.
            announce: begin to publish the new version while the optimizer makes it, where the backend can;
                called if engines can receive it then. None: `publish` does all of it.

        Raises:
            TetherError: the engine whose weights the step was computed with has ended meanwhile.
        """
        self._ahead = None
        if announce is None:
            return await self.run(self._train, command)
        loop, version = asyncio.get_running_loop(), command.step + 1

        def say(draft: WeightDraft) -> None:
            loop.call_soon_threadsafe(announce, draft)

        def begin(tensors: Tensors) -> None:
            self._ahead = self._publisher.submit(self._publish_ahead, epoch, version, tensors, say)

        return await self.run(self._train, command, begin)

    async def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Let engines receive a version while `publish` makes it; None if the transport cannot do that.

        None, too, if the version was begun to be published in its step.
        """
        if self._ahead is not None:
            return None
        return await self.lead(DraftCommand(epoch, version))

    async def publish(self, epoch: str, version: int) -> WeightManifest:
        """Export the weights and make the version available; complete when it returns."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return await asyncio.wrap_future(ahead)
        return await self.lead(PublishCommand(epoch, version, self._engine_dtype))

    async def digest(self) -> int:
        """Return the digest that the weights would be published under."""
        return await self.lead(DigestWeightsCommand(self._engine_dtype))

    async def restore(self, directory: Path) -> None:
        """Load a checkpoint."""
        if self.shared_engine is not None:
            await self.run(self.shared_engine.invalidate)
        await self.lead(RestoreCommand(str(directory)))

    async def finish_save(self) -> str:
        """Wait until every rank's part of a checkpoint is on disk, during the steps if the backend can.

        Returns:
            Why an export that was begun is incomplete; empty if it is complete.

        Raises:
            TetherError: a rank could not write its part of the checkpoint.
        """
        await asyncio.to_thread(self.executor.await_part)
        if self.executor.has_followers:  # a command to the other ranks comes between two others
            failure = await self.lead(FinishSaveCommand())
        else:
            failure = await asyncio.to_thread(self.executor.lead, FinishSaveCommand())
        if CHECKPOINT in failure:
            raise TetherError(failure[CHECKPOINT])
        return failure.get(EXPORT, "")

    async def close(self) -> None:
        """Close sender, model and threads."""
        await asyncio.to_thread(self._publisher.shutdown)  # an export that was begun ends with its step
        self.sender.close()
        await self.run(self.executor.close)
        self._thread.shutdown()

    def _train(
        self, command: TrainCommand, begin: Callable[[Tensors], None] | None = None
    ) -> tuple[StepPlan, StepStats]:
        if self.shared_engine is not None:
            self.shared_engine.invalidate()
        result = self.executor.train(command, begin)
        if self.shared_engine is not None:
            self.shared_engine.check()
        return result

    def _publish_ahead(
        self, epoch: str, version: int, tensors: Tensors, announce: Callable[[WeightDraft], None]
    ) -> WeightManifest:
        if draft := self.sender.provisional(epoch, version):
            announce(draft)
        named = in_dtype(tensors, self._engine_dtype)
        return self.sender.publish(epoch, version, named, base_model=self.executor.models.policy.architecture)


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
    """Load rank 0's part of the model and open its sender, in the thread that will do all of its work.

    Raises:
        SettingsError: the model cannot be loaded, or the transport cannot be used, with these settings.
        WeightError: the sender cannot set itself up.
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
