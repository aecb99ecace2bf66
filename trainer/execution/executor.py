"""Executes commands on one rank. All ranks execute the same commands, which rank 0 sends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from protocol.device.profiles import profiled
from protocol.device.shared_layout import BUFFERS, PARAMETERS, rank_file
from protocol.device.shared_tensors import map_tensors
from trainer.backends.base import StepStats
from trainer.backends.early_export import Tensors
from trainer.batch import Batch
from trainer.data.prefix_tree import RowFamily
from trainer.execution.commands import (
    AnyCommand,
    AttachCommand,
    CopyWeightsCommand,
    DigestWeightsCommand,
    DraftCommand,
    ExitCommand,
    ExportCommand,
    FinishSaveCommand,
    IdleCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    PublishCommand,
    RankCommand,
    RestoreCommand,
    SaveCommand,
    StepCommand,
    encode_command,
    next_command,
)
from trainer.execution.state_writer import CHECKPOINT, EXPORT, StateWriter
from trainer.ranks.collectives import broadcast_message, is_distributed, wait_for_ranks
from trainer.ranks.wire import receive_part, send_part
from trainer.roles.models import RankModels
from trainer.roles.remote import RoleLink, StepDivision
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand, plan_command, schedule_updates
from trainer.step.update import make_updates
from trainer.storage.hf_export import Shards
from trainer.storage.host_state import HostCopies
from trainer.weights.base import WeightSender
from trainer.weights.publish import publish, published, published_digest

T = TypeVar("T")


class Executor:
    """Models and sender of one rank.

    Every method blocks; one thread calls all methods except `await_part`.
    """

    def __init__(self, models: RankModels, sender: WeightSender | None = None) -> None:
        """Take ownership of loaded models.

        Args:
            sender: sender of this rank; None: rank 0 publishes everything, or versions are not published.
        """
        self.models = models
        self._sender = sender
        self._writer = StateWriter()
        self._weights, self._model, self._adapter = HostCopies(), HostCopies(), HostCopies()

    def lead(self, command: RankCommand[T]) -> T:
        """Execute a command on all ranks, from rank 0; return rank 0's result."""
        self._send_command(command)
        result: T = self.carry_out(command)
        return result

    @property
    def has_followers(self) -> bool:
        """Whether other ranks execute this rank's commands."""
        return is_distributed() or bool(self.models.links)

    def follow(self) -> None:
        """Execute the commands of rank 0, on another rank, until `ExitCommand`."""
        while not isinstance(command := next_command(), ExitCommand):
            self.carry_out(command)

    def train(
        self, command: TrainCommand, begin: Callable[[Tensors], None] | None = None
    ) -> tuple[StepPlan, StepStats]:
        """Run a step from rank 0: plan it, send each replica its part, and run the updates on all ranks.

        Args:
            command: groups of the step.
            begin: may be called with the tensors of the new version, as in `Backend.export_ahead`; None: the
                version is exported after the step.

        Returns:
            The plan, and the measurements.

        Raises:
            ProtocolError, BoundViolation: as `plan_command`; no rank has started the step.
        """
        algorithm, policy = self.models.algorithm, self.models.policy
        plan = plan_command(command, algorithm)
        families = plan.families(shared=policy.shares_prefixes)
        pieces, imbalance = plan.mini_batches.divide(families, policy.costs, len(policy.replicas))
        step = StepCommand(schedule_updates(command, plan, algorithm), command.profile)
        own, *others = [plan.part(piece) for piece in pieces]  # may raise, so before any rank begins
        self._send_command(step)
        for link in self.models.links.values():
            self._send_step(link, plan, families, pieces)
        for ranks, part in zip(policy.replicas[1:], others, strict=True):
            send_part(part, ranks)
        send_part(own, [rank for rank in policy.replicas[0] if rank != 0])
        with policy.export_ahead(begin, len(step.schedule.updates)).step():
            stats = self.carry_out(step, own)
        draft_loss = self.models.drafts.join(own) if self.models.drafts is not None else None
        return plan, msgspec.structs.replace(stats, imbalance=imbalance, draft_loss=draft_loss)

    def carry_out(self, command: RankCommand[T] | AnyCommand, part: Batch | None = None) -> Any:
        """Execute this rank's share of a command. A collective.

        Args:
            command: same command on every rank.
            part: rank 0's part of a step; None: receive this rank's part from rank 0.
        """
        models, sender = self.models, self._sender
        match command:
            case StepCommand():
                batch = receive_part() if part is None else part
                with profiled(command.profile, _rank()):
                    return make_updates(models, batch, command.schedule)
            case CopyWeightsCommand():
                return self._weights.copy_all(published(models.policy, command.dtype))
            case DigestWeightsCommand():
                return published_digest(models.policy, command.dtype)
            case ExportCommand():
                adapter = self._adapter.copy_all(models.policy.export()) if models.policy.targets else {}
                shards = Shards(self._model.copy_all(models.policy.export_model()), _rank())
                self._writer.begin(shards, Path(command.directory), EXPORT)
                return adapter
            case DraftCommand():
                return sender.provisional(command.epoch, command.version) if sender is not None else None
            case PublishCommand():
                return publish(models.policy, sender, command.epoch, command.version, command.dtype)
            case SaveCommand():
                self._writer.begin(models.copy_state(), Path(command.directory))
            case FinishSaveCommand():
                own_failures, remote_failure = self._writer.finish(), models.finish_save()
                return ({CHECKPOINT: remote_failure} if remote_failure else {}) | own_failures
            case RestoreCommand():
                models.restore(Path(command.directory))
            case AttachCommand():
                found = map_tensors(rank_file(Path(command.file), _rank()))
                models.policy.attach(found.get(PARAMETERS, {}), found.get(BUFFERS, {}))
            case KeepReferenceCommand():
                models.keep_reference()
            case OffloadCommand():
                self._offload()
            case OnloadCommand():
                models.onload()
            case IdleCommand() | ExitCommand():
                pass
            case _:
                raise TypeError(f"{type(command).__name__} is not a command of ranks")
        return None

    def await_part(self) -> None:
        """Wait until this rank's shard of a checkpoint is written or has failed; callable from any thread."""
        self._writer.wait()

    def close(self) -> None:
        """Release the models after their checkpoint is written; idempotent."""
        self._writer.close()
        self.models.close()

    def _send_command(self, command: RankCommand[T]) -> None:
        """Send a command to every other rank of the policy, and of models on ranks of their own."""
        data = encode_command(command)
        broadcast_message(data)
        for link in self.models.links.values():
            link.send_command(data)

    def _send_step(
        self, link: RoleLink, plan: StepPlan, families: list[RowFamily], pieces: list[list[int]]
    ) -> None:
        """Send each replica of a model on ranks of its own its part of a step.

        Args:
            families: rows of the step that should stay together.
            pieces: rows of each replica of the policy.
        """
        costs = self.models.policy.costs
        remote_rows, _ = plan.mini_batches.divide(families, costs, len(link.replicas))
        division = StepDivision(plan.lengths.tolist(), pieces, remote_rows)
        link.send_step([plan.part(piece) for piece in remote_rows], division)

    def _offload(self) -> None:
        """Move this rank's device state to the host, and wait until every rank has done so.

        The ranks share one lock of the device, which rank 0 may release only afterwards.
        """
        self.models.offload()
        if is_distributed():
            wait_for_ranks()


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0
