"""Makes receivers by the name of their transport."""

from collections.abc import Callable, Iterator

import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import check_manifest
from protocol.weights.slices import Wanted, check_parts
from rollout.weights.base import Destination, WeightReceiver, no_destination
from rollout.weights.disk import DiskReceiver
from rollout.weights.ipc import IpcReceiver
from rollout.weights.nccl import NcclReceiver
from rollout.weights.parts.handles import HandleSlices
from rollout.weights.parts.pairs import PairSlices
from rollout.weights.parts.receiver import PartReceiver, ReceivedSlice, SliceChannel
from rollout.weights.shared import SharedReceiver
from rollout.weights.shm import ShmReceiver

RECEIVERS: dict[str, Callable[[], WeightReceiver]] = {
    "disk": DiskReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "shared": SharedReceiver,
    "shm": ShmReceiver,
}


SLICE_CHANNELS: dict[str, Callable[[], SliceChannel]] = {"ipc": HandleSlices, "nccl": PairSlices}
"""Transport by which versions can stay on the trainer's ranks -> how slices of them are received."""


class CheckedReceiver:
    """A receiver that refuses a manifest which contradicts itself before it fetches a byte."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        check_manifest(manifest)
        if manifest.parts:
            raise WeightError(
                f"version {manifest.version} is in parts, and this receiver fetches whole tensors"
            )
        yield from self._receiver.tensors(manifest, deadline_s, place)

    @property
    def digest(self) -> int:
        return self._receiver.digest

    def close(self) -> None:
        self._receiver.close()


class CheckedPartReceiver:
    """A receiver of slices that refuses a manifest which contradicts itself before it fetches a byte."""

    def __init__(self, receiver: PartReceiver) -> None:
        self._receiver = receiver

    def slices(
        self, manifest: WeightManifest, wanted: Wanted, deadline_s: float
    ) -> Iterator[list[ReceivedSlice]]:
        """Yield every wanted element once, see `PartReceiver`."""
        check_manifest(manifest)
        check_parts(manifest)
        yield from self._receiver.slices(manifest, wanted, deadline_s)

    @property
    def digest(self) -> int:
        return self._receiver.digest

    def close(self) -> None:
        self._receiver.close()


def make_part_receiver(transport: str) -> CheckedPartReceiver:
    """Return the receiver of slices of a manifest's transport; it checks each manifest before it uses it.

    Raises:
        WeightError: the transport is unknown, or none by which versions stay on the trainer's ranks.
    """
    make = SLICE_CHANNELS.get(transport)
    if make is None:
        raise WeightError(
            f"transport {transport!r} has no parts; there are {', '.join(sorted(SLICE_CHANNELS))}"
        )
    return CheckedPartReceiver(PartReceiver(make))


def make_receiver(transport: str) -> WeightReceiver:
    """Return the receiver of a manifest's transport; it checks each manifest before it uses it.

    Raises:
        WeightError: the transport is unknown; lists the known ones.
    """
    make = RECEIVERS.get(transport)
    if make is None:
        raise WeightError(f"transport {transport!r} is not known; there are {', '.join(sorted(RECEIVERS))}")
    return CheckedReceiver(make())
