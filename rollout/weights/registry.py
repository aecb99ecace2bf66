"""Makes receivers by the name of their transport."""

from collections.abc import Callable

from protocol.errors import WeightError
from rollout.weights.base import WeightReceiver
from rollout.weights.checked import CheckedPartReceiver, CheckedReceiver
from rollout.weights.files import FileReceiver
from rollout.weights.ipc import IpcReceiver
from rollout.weights.nccl import NcclReceiver
from rollout.weights.parts.handles import HandleSlices
from rollout.weights.parts.pairs import PairSlices
from rollout.weights.parts.receiver import PartReceiver, SliceChannel
from rollout.weights.shared import SharedReceiver

RECEIVERS: dict[str, Callable[[], WeightReceiver]] = {
    "disk": FileReceiver,
    "ipc": IpcReceiver,
    "nccl": NcclReceiver,
    "shared": SharedReceiver,
    "shm": FileReceiver,
}


SLICE_CHANNELS: dict[str, Callable[[], SliceChannel]] = {"ipc": HandleSlices, "nccl": PairSlices}
"""Transport by which versions can stay on the trainer's ranks -> how slices of them are received."""


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
