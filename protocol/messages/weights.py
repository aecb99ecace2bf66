"""Weights: what a version consists of and where it can be fetched, and what engines answer."""

import msgspec

from protocol.messages.base import Message


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a version: where its bytes lie and what they must hash to."""

    name: str
    """Name in the Hugging Face checkpoint of the model."""
    dtype: str
    """torch dtype without prefix: "float32", "bfloat16" ..."""
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's `buckets`."""
    offset: int
    """Byte offset within the bucket."""
    nbytes: int
    digest: int
    """`protocol.weights.digests.digest` of the tensor's bytes as sent."""


class WeightManifest(Message, tag="weight_manifest", frozen=True, kw_only=True):
    """Everything an engine needs to stage one version. Sent by the trainer, kept in the ledger."""

    epoch: str
    version: int
    transport: str
    """"shm", "disk", "nccl", "ipc" ...: the receiver in `rollout/weights/` of the same name."""
    location: str
    """What that receiver needs to find the bytes (a directory, an endpoint)."""
    buckets: tuple[int, ...]
    """Bytes of each bucket."""
    tensors: tuple[TensorEntry, ...]
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs (absent name, name that holds the bytes) of tied tensors."""
    digest: int = 0
    """xxh3-64 over all entries (`protocol.weights.buckets.manifest_digest`): two versions with equal digests
    are the same bits."""
    base_model: str = ""
    """Architecture name in the model's config.json, checked by the engine."""


class WeightDraft(Message, tag="weight_draft", frozen=True, kw_only=True):
    """A version is being made: an engine may begin to receive it, and serves it only when its manifest has
    come.

    Sent by the trainer, never kept. An engine that misses it loses nothing but time.
    """

    epoch: str
    version: int
    like: int
    """The version of the same epoch whose manifest names the same tensors at the same places; only the
    digests are not known yet."""


class WeightStaged(Message, tag="weight_staged", frozen=True, kw_only=True):
    """Sent by an engine when all its ranks hold a complete, verified copy beside the live weights."""

    engine: str
    epoch: str
    version: int
    digest: int
    stage_ms: float = 0.0


class WeightApplied(Message, tag="weight_applied", frozen=True, kw_only=True):
    """Sent by an engine when the version is live on all its ranks."""

    engine: str
    epoch: str
    version: int
    pause_ms: float = 0.0
    """How long running requests got no token because of the update."""


class WeightFailed(Message, tag="weight_failed", frozen=True, kw_only=True):
    """Sent by an engine that could not stage or apply a version."""

    engine: str
    epoch: str
    version: int
    error: str
    poisoned: bool = False
    """True if live weights may be mixed: the engine is about to reload or exit."""
