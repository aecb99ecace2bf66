"""Makes senders of given tensors, and receives whole versions."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import torch
from msgspec.structs import replace

from protocol.host.key_proof import SenderKeys
from protocol.messages import TensorEntry, WeightManifest, WeightPart, WeightPiece
from protocol.weights.boxes import whole
from protocol.weights.buckets import BucketLayout, manifest_digest
from protocol.weights.provisional import UNKNOWN
from protocol.weights.slices import all_of
from rollout.weights.base import Destination, WeightReceiver, no_destination
from rollout.weights.registry import make_receiver
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import checked_dtype
from trainer.weights.files import disk_sender, http_sender, shm_sender
from trainer.weights.served.sender import PartSender

Named = Iterable[tuple[str, torch.Tensor]]
DEADLINE_S = 60.0


def layout_of(tensors: Named, config: WeightConfig) -> WeightManifest:
    """The blank manifest of versions of these tensors, in their dtypes, which one rank publishes."""
    layout, entries = BucketLayout(config.bucket_mb << 20), []
    for name, tensor in tensors:
        place = layout.place(name, tensor.nbytes)
        entries.append(
            TensorEntry(
                name, checked_dtype(name, tensor), tuple(tensor.shape), *place, tensor.nbytes, UNKNOWN
            )
        )
    return WeightManifest(
        epoch="",
        version=0,
        transport=config.transport,
        location="",
        buckets=tuple(layout.buckets),
        tensors=tuple(entries),
        parts=(WeightPart("", tuple(WeightPiece(i, whole(e.shape)) for i, e in enumerate(entries))),),
    )


def part_sender(config: WeightConfig, tensors: Named, keys: SenderKeys | None = None) -> PartSender:
    """The sender of a trainer of one rank, over nccl or ipc."""
    return PartSender(config, 0, layout_of(tensors, config), keys)


def sender_of(
    config: WeightConfig, tensors: Named, directory: Path, run: str = "sender-test"
) -> WeightSender:
    """The sender of a trainer of one rank, over any transport of copies."""
    blank = layout_of(tensors, config) if config.delta else None
    if config.transport == "shm":
        return shm_sender(config, run, blank)
    if config.transport == "disk":
        return disk_sender(config, directory, blank)
    if config.transport == "http":
        return http_sender(config, directory, blank)
    return part_sender(config, tensors)


def at(manifest: WeightManifest, location: str) -> WeightManifest:
    """The version as it is served at another place."""
    (part,) = manifest.parts
    return replace(
        manifest,
        location=location,
        parts=(replace(part, location=location),),
        digest=manifest_digest(manifest.tensors),
    )


def read_request(lines: IO[bytes]) -> dict[str, object]:
    """A receiver's request, and what follows it."""
    request: dict[str, object] = json.loads(lines.readline())
    lines.read(int(str(request.get("slices", 0))))
    return request


def received(
    receiver: WeightReceiver,
    manifest: WeightManifest,
    deadline_s: float = DEADLINE_S,
    place: Destination = no_destination,
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The tensors of a version, each when the last of its slices has come; in place if it is a single one."""
    missing = {entry.name: math.prod(entry.shape) for entry in manifest.tensors}
    parts: dict[str, torch.Tensor] = {}
    for slices in receiver.slices(manifest, all_of(manifest), deadline_s, place):
        for entry, box, tensor in slices:
            if not missing[entry.name]:
                continue
            missing[entry.name] -= tensor.numel()
            if tuple(tensor.shape) == entry.shape:
                yield entry, tensor
                continue
            whole_one = parts.setdefault(entry.name, torch.empty(entry.shape, dtype=tensor.dtype))
            whole_one[tuple(slice(*side) for side in box)] = tensor
            if not missing[entry.name]:
                yield entry, whole_one
    for entry in manifest.tensors:
        if 0 in entry.shape:  # nothing is sent of it
            yield entry, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))


def receive(manifest: WeightManifest, deadline_s: float = DEADLINE_S) -> dict[str, torch.Tensor]:
    """The tensors of a version, copied."""
    with closing(make_receiver(manifest.transport)) as receiver:
        return {entry.name: tensor.clone() for entry, tensor in received(receiver, manifest, deadline_s)}
