"""Defines the commands that every rank executes, and sends them from rank 0 to the other ranks.

A command is one small message of bytes; ranks exchange no pickles.
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
    """Run the updates of a step. Each rank receives the part of its replica."""

    schedule: UpdateSchedule
    profile: str = ""
    """As `TrainCommand.profile`."""


class CopyWeightsCommand(RankCommand[dict[str, torch.Tensor]], frozen=True, tag="copy_weights"):
    """Copy the weights, as published, to rank 0's host memory; valid until the next copy."""

    dtype: str
    """Dtype of the published weights."""


class DigestWeightsCommand(RankCommand[int], frozen=True, tag="digest_weights"):
    """Compute the digest of the manifest that the weights would have, without copying the model."""

    dtype: str
    """Dtype of the published weights."""


class ExportCommand(RankCommand[Mapping[str, torch.Tensor]], frozen=True, tag="export"):
    """Copy the whole model to host memory, each tensor on one rank, and begin to write it to files.

    The model may change afterwards; `FinishSaveCommand` follows. The result contains copies of the adapters'
    A and B under PEFT's names, not scaled, valid until the next export; empty without adapters.
    """

    directory: str
    """Directory from `shards_of`."""


class DraftCommand(RankCommand[WeightDraft | None], frozen=True, tag="draft"):
    """Accept requests for the parts of a version that the next `PublishCommand` will publish.

    None: the transport does not support early requests.
    """

    epoch: str
    version: int


class PublishCommand(RankCommand[WeightManifest], frozen=True, tag="publish"):
    """Publish a version: each rank its part, or rank 0 all gathered tensors."""

    epoch: str
    version: int
    dtype: str
    """Dtype of the published weights."""


class SaveCommand(RankCommand[None], frozen=True, tag="save"):
    """Copy every rank's shard of a checkpoint to the host, and begin to write it to an existing directory.

    The model may change afterwards. `FinishSaveCommand` must follow before the next checkpoint begins.
    """

    directory: str


class FinishSaveCommand(RankCommand[dict[str, str]], frozen=True, tag="finish_save"):
    """Wait until every rank has written its shard of the checkpoint, and of the export if one has begun.

    Returns the result of `StateWriter.finish`.
    """


class RestoreCommand(RankCommand[None], frozen=True, tag="restore"):
    """Load a checkpoint."""

    directory: str


class AttachCommand(RankCommand[None], frozen=True, tag="attach"):
    """Compute with the live weights that an engine describes, each rank with the engine's same rank."""

    file: str
    """Description file of the engine's rank 0."""


class KeepReferenceCommand(RankCommand[None], frozen=True, tag="keep_reference"):
    """Keep the current weights as the reference model."""


class OffloadCommand(RankCommand[None], frozen=True, tag="offload"):
    """Move all device state to the host, and wait until every rank has done so."""


class OnloadCommand(RankCommand[None], frozen=True, tag="onload"):
    """Move the offloaded state back to the devices."""


class IdleCommand(RankCommand[None], frozen=True, tag="idle"):
    """Command without an effect, which keeps the other ranks from reaching their timeout."""


class ExitCommand(RankCommand[None], frozen=True, tag="exit"):
    """End the ranks other than rank 0."""


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
    """Encode a command as a message between ranks."""
    return msgspec.msgpack.encode(command)


def decode_command(data: bytes) -> AnyCommand:
    """Decode the command in a message."""
    return _decoder.decode(data)


def next_command() -> AnyCommand:
    """Wait for the next command, on a policy rank other than 0; at most the process group's timeout."""
    return decode_command(next_message())
