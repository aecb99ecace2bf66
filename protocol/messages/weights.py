"""Defines the messages about weight versions: manifests of the trainer and answers of the engines."""

from typing import Annotated

import msgspec

from protocol.messages.base import Message

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A time that a peer has measured: no NaN or infinity, and no number that would spoil a mean."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a version: location and digest of its bytes."""

    name: str
    """Name in the Hugging Face checkpoint of the model."""
    dtype: str
    """torch dtype without the prefix "torch.": "float32", "bfloat16" ..."""
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's `buckets`."""
    offset: int
    """Byte offset within the bucket."""
    nbytes: int
    digest: int
    """`protocol.weights.digests.digest` of the tensor's bytes as published."""


class WeightPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that one trainer rank has."""

    tensor: int
    """Index into the manifest's `tensors`."""
    box: tuple[tuple[int, int], ...]
    """(start, stop) in each dimension of the tensor."""


class WeightPart(msgspec.Struct, frozen=True, array_like=True):
    """One trainer rank's part of a version."""

    location: str
    """Where its receiver finds it, as `WeightManifest.location`; empty if it has no piece."""
    pieces: tuple[WeightPiece, ...]
    """Over all parts they hold each element of each tensor once."""


class WeightLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version of a chain: an anchor, which has all bytes, or the changes since the link before it."""

    directory: str
    """Name of the version's directory, next to the directory of the manifest's version."""
    digest: int
    """Digest of the version's manifest."""
    nbytes: int
    """Bytes of the anchor's buckets, or of the files of changes."""
    apart: bool = False
    """Whether this is an anchor whose bytes are in files of changes, one of each trainer rank."""


class WeightManifest(Message, tag="weight_manifest", frozen=True, kw_only=True):
    """Everything that an engine needs to stage a version; made by the trainer, stored in the ledger."""

    epoch: str
    version: int
    transport: str
    """"shm", "disk", "nccl", "ipc" ...: name of the receiver in `rollout/weights/`."""
    location: str
    """Where that receiver finds the bytes: a directory, a file or an endpoint, see the receiver."""
    buckets: tuple[int, ...]
    """Size of each bucket, bytes."""
    tensors: tuple[TensorEntry, ...]
    digest: int = 0
    """xxh3-64 over all entries (`protocol.weights.buckets.manifest_digest`): versions with equal digests are
    bit-identical."""
    base_model: str = ""
    """Architecture name from the model's config.json, which the engine checks."""
    parts: tuple[WeightPart, ...] = ()
    """By trainer rank, where the bytes stay on the ranks: `location` is rank 0's then, and buckets and
    offsets name no bytes. Empty: `location` has all bytes."""
    chain: tuple[WeightLink, ...] = ()
    """By which this version is read where changes alone are written: an anchor, then deltas, its own last.
    The layout of all of them is the manifest's. Empty: `location` has all bytes."""


class WeightDraft(Message, tag="weight_draft", frozen=True, kw_only=True):
    """Announcement of a version that is still being exported: engines may begin to receive it.

    Sent by the trainer, never stored. An engine serves the version only once it has the manifest; an engine
    that misses the announcement merely receives the version later.
    """

    epoch: str
    version: int
    like: int
    """An earlier version of the same epoch with the same layout; of its manifest, only the digests differ."""


class WeightStaged(Message, tag="weight_staged", frozen=True, kw_only=True):
    """Sent by an engine when all of its ranks have staged a complete, verified copy."""

    engine: str
    epoch: str
    version: int
    digest: int
    """Manifest digest of the staged copy."""
    stage_ms: Milliseconds = 0.0
    """Time from the request for the version to its verified copy."""


class WeightApplied(Message, tag="weight_applied", frozen=True, kw_only=True):
    """Sent by an engine when the version is live on all of its ranks."""

    engine: str
    epoch: str
    version: int
    pause_ms: Milliseconds = 0.0
    """Time for which running requests got no token because of the update."""


class WeightFailed(Message, tag="weight_failed", frozen=True, kw_only=True):
    """Sent by an engine that could not stage or commit a version."""

    engine: str
    epoch: str
    version: int
    error: str
    poisoned: bool = False
    """True if the live weights may be a mixture of versions; the engine then exits."""
