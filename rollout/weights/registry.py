"""Makes receivers by the name of their transport."""

from collections.abc import Callable, Iterator

import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import check_manifest
from rollout.weights.base import Destination, WeightReceiver, no_destination
from rollout.weights.disk import DiskReceiver
from rollout.weights.ipc import IpcReceiver
from rollout.weights.nccl import NcclReceiver
from rollout.weights.shared import SharedReceiver
from rollout.weights.shm import ShmReceiver

RECEIVERS: dict[str, Callable[[], WeightReceiver]] = {
    "disk": DiskReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "shared": SharedReceiver,
    "shm": ShmReceiver,
}


class CheckedReceiver:
    """A receiver that refuses a manifest which contradicts itself before it fetches a byte."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        check_manifest(manifest)
        yield from self._receiver.tensors(manifest, deadline_s, place)

    @property
    def digest(self) -> int:
        return self._receiver.digest

    def close(self) -> None:
        self._receiver.close()


def make_receiver(transport: str) -> WeightReceiver:
    """Return the receiver of a manifest's transport; it checks each manifest before it uses it.

    Raises:
        WeightError: the transport is unknown; lists the known ones.
    """
    make = RECEIVERS.get(transport)
    if make is None:
        raise WeightError(f"transport {transport!r} is not known; there are {', '.join(sorted(RECEIVERS))}")
    return CheckedReceiver(make())
