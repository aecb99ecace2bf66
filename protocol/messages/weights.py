"""Defines the messages about weight versions: manifests by the trainer and replies by the engines."""

from typing import Annotated

import msgspec

from protocol.messages.base import Message

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Duration measured by a peer, ms. NaN, infinity and huge values are invalid because they would spoil a mean.
"""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a version: location and digest of its bytes."""

    name: str
    """Name in the model's Hugging Face checkpoint."""
    dtype: str
    """torch dtype without the prefix "torch.": "float32", "bfloat16" ..."""
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's `buckets`."""
    offset: int
    """Byte offset within the bucket."""
    nbytes: int
    digest: int
    """`protocol.weights.digests.digest` of the published bytes."""


class WeightPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that one trainer rank holds."""

    tensor: int
    """Index into the manifest's `tensors`."""
    box: tuple[tuple[int, int], ...]
    """(start, stop) in each dimension of the tensor."""


class WeightPart(msgspec.Struct, frozen=True, array_like=True):
    """One trainer rank's share of a version."""

    location: str
    """As in `WeightManifest.location`; empty if the rank has no piece."""
    pieces: tuple[WeightPiece, ...]
    """Over all ranks, the pieces contain each element of each tensor once."""


class WeightLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version of a chain: an anchor with all bytes, or a delta against the previous version."""

    directory: str
    """Name of the version's directory, next to the directory of the manifest's version."""
    digest: int
    """Digest of the version's manifest."""
    nbytes: int
    """Size of the anchor's buckets or of the delta's files, bytes."""
    apart: bool = False
    """Whether the version is an anchor whose bytes are in delta files, one file per trainer rank."""


class WeightManifest(Message, tag="weight_manifest", frozen=True, kw_only=True):
    """Everything that an engine needs to stage a version; created by the trainer, stored in the ledger."""

    epoch: str
    version: int
    transport: str
    """Transport, which selects the receiver in `rollout/weights/`: "shm", "disk", "nccl", "ipc" ..."""
    location: str
    """Location of the bytes for the receiver: a directory, file or endpoint, depending on the transport."""
    buckets: tuple[int, ...]
    """Size of each bucket, bytes."""
    tensors: tuple[TensorEntry, ...]
    digest: int = 0
    """xxh3-64 over all entries (`protocol.weights.buckets.manifest_digest`): versions with equal digests are
    bit-identical."""
    base_model: str = ""
    """Architecture name in the model's config.json; the engine checks the name."""
    parts: tuple[WeightPart, ...] = ()
    """Shares by trainer rank, if the bytes stay on the ranks. `location` is then rank 0's, and buckets and
    offsets refer to no bytes. Empty: `location` has all bytes."""
    chain: tuple[WeightLink, ...] = ()
    """Chain of versions to read if the trainer writes deltas: an anchor, then deltas, this version last. All
    versions of the chain have this manifest's layout. Empty: `location` has all bytes."""


class WeightDraft(Message, tag="weight_draft", frozen=True, kw_only=True):
    """Announcement of a version during its export: engines may begin to receive the version.

    Sent by the trainer, never stored. An engine serves the version only after it has the manifest. An engine
    that misses the announcement receives the version later.
    """

    epoch: str
    version: int
    like: int
    """Earlier version of the epoch with the same layout. The two manifests differ only in their digests."""


class WeightStaged(Message, tag="weight_staged", frozen=True, kw_only=True):
    """Reply of an engine after all of its ranks have staged a complete, verified copy."""

    engine: str
    epoch: str
    version: int
    digest: int
    """Manifest digest of the staged copy."""
    stage_ms: Milliseconds = 0.0
    """Time from the request for the version until the copy is verified."""


class WeightApplied(Message, tag="weight_applied", frozen=True, kw_only=True):
    """Reply of an engine after the version is live on all of its ranks."""

    engine: str
    epoch: str
    version: int
    pause_ms: Milliseconds = 0.0
    """Time in which running requests received no token because of the update."""


class WeightFailed(Message, tag="weight_failed", frozen=True, kw_only=True):
    """Reply of an engine that could not stage or commit a version."""

    engine: str
    epoch: str
    version: int
    error: str
    poisoned: bool = False
    """Whether the live weights may mix versions; the engine then exits."""
