"""Creates receivers by the name of their transport."""

from collections.abc import Callable
from functools import partial

from protocol.errors import WeightError
from rollout.weights.base import WeightReceiver
from rollout.weights.checked import CheckedReceiver
from rollout.weights.files import FileReceiver
from rollout.weights.ipc_handles import HandleSlices
from rollout.weights.nccl_pairs import PairSlices
from rollout.weights.part_receiver import PartReceiver
from rollout.weights.shared import SharedReceiver

RECEIVERS: dict[str, Callable[[], WeightReceiver]] = {
    "disk": FileReceiver,
    "http": FileReceiver,
    "ipc": partial(PartReceiver, HandleSlices),
    "nccl": partial(PartReceiver, PairSlices),
    "shared": SharedReceiver,
    "shm": FileReceiver,
}


def make_receiver(transport: str, *, shared: bool = False) -> WeightReceiver:
    """Return the receiver for a transport; it checks each manifest before use.

    Args:
        transport: transport in the manifest.
        shared: see `FileReceiver`; other receivers map no files.

    Raises:
        WeightError: the transport is unknown; the message lists the known ones.
    """
    make = RECEIVERS.get(transport)
    if make is None:
        raise WeightError(f"transport {transport!r} is not known; there are {', '.join(sorted(RECEIVERS))}")
    return CheckedReceiver(FileReceiver(shared=shared) if make is FileReceiver else make())
