"""Defines the commands that every rank carries out, and sends them from rank 0 to the others.

A command is one small message, sent as bytes: no pickle between ranks either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec
import torch

from protocol.messages import WeightDraft, WeightManifest
from trainer.backends.base import StepStats
from trainer.ranks.collectives import next_message
from trainer.step.train_command import UpdateSchedule

T = TypeVar("T")


class RankCommand(msgspec.Struct, Generic[T], frozen=True):
    """A collective of all ranks, with the type of its result on rank 0."""


class StepCommand(RankCommand[StepStats], frozen=True, tag="step"):
    """Make the updates of a step. Each rank is sent the part of its replica."""

    schedule: UpdateSchedule
    profile: str = ""
    """As `TrainCommand.profile`."""


class CopyWeightsCommand(RankCommand[dict[str, torch.Tensor]], frozen=True, tag="copy_weights"):
    """Copy the weights to rank 0's host memory, as they are published; valid until the next copy."""

    dtype: str
    """Dtype in which they are published."""


class DigestWeightsCommand(RankCommand[int], frozen=True, tag="digest_weights"):
    """Compute the digest that a manifest of the weights would have, without a copy of the model."""

    dtype: str
    """Dtype in which they are published."""


class ExportCommand(RankCommand[Mapping[str, torch.Tensor]], frozen=True, tag="export"):
    """Copy the whole model to the hosts, each tensor on one rank, and begin to write it as files.

    The model may change then. `FinishSaveCommand` follows. The result has copies of the adapters' A and B by
    PEFT's names, not scaled, valid until the next export; empty without adapters.
    """

    directory: str
    """Directory of `shards_of`."""


class DraftCommand(RankCommand[WeightDraft | None], frozen=True, tag="draft"):
    """Accept requests for the parts of a version that the next `PublishCommand` will make.

    None: the transport cannot do that.
    """

    epoch: str
    version: int


class PublishCommand(RankCommand[WeightManifest], frozen=True, tag="publish"):
    """Publish a version: each rank its part, or rank 0 all that the ranks gather."""

    epoch: str
    version: int
    dtype: str
    """Dtype in which it is published."""


class SaveCommand(RankCommand[None], frozen=True, tag="save"):
    """Copy every rank's part of a checkpoint to the host, and begin to write it to an existing directory.

    The model may change then. `FinishSaveCommand` follows, before the next checkpoint is begun.
    """

    directory: str


class FinishSaveCommand(RankCommand[dict[str, str]], frozen=True, tag="finish_save"):
    """Wait until every rank has written its part of the checkpoint, and of the export if one was begun.

    Returns the result of `StateWriter.finish`.
    """


class RestoreCommand(RankCommand[None], frozen=True, tag="restore"):
    """Load a checkpoint."""

    directory: str


class AttachCommand(RankCommand[None], frozen=True, tag="attach"):
    """Compute with the live weights that an engine describes, each rank with those of the same rank."""

    file: str
    """The description of the engine's rank 0."""


class KeepReferenceCommand(RankCommand[None], frozen=True, tag="keep_reference"):
    """Keep the current weights as the reference model."""


class OffloadCommand(RankCommand[None], frozen=True, tag="offload"):
    """Move everything on the devices to the host, and wait until every rank has."""


class OnloadCommand(RankCommand[None], frozen=True, tag="onload"):
    """Move back to the devices what was offloaded."""


class IdleCommand(RankCommand[None], frozen=True, tag="idle"):
    """Command without an effect: keeps the other ranks' wait bounded."""


class ExitCommand(RankCommand[None], frozen=True, tag="exit"):
    """End the ranks other than 0."""


AnyCommand = (
    StepCommand
    | CopyWeightsCommand
    | DigestWeightsCommand
    | ExportCommand
    | DraftCommand
    | PublishCommand
    | SaveCommand
    | FinishSaveCommand
    | RestoreCommand
    | AttachCommand
    | KeepReferenceCommand
    | OffloadCommand
    | OnloadCommand
    | IdleCommand
    | ExitCommand
)
_decoder = msgspec.msgpack.Decoder(AnyCommand)


def encode_command(command: RankCommand[T]) -> bytes:
    """Return a command as a message between ranks."""
    return msgspec.msgpack.encode(command)


def decode_command(data: bytes) -> AnyCommand:
    """Return the command of a message."""
    return _decoder.decode(data)


def next_command() -> AnyCommand:
    """Wait for the next command, on another rank of the policy; at most the process group's timeout."""
    return decode_command(next_message())
