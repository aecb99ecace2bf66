"""Reads a version from the trainer's fp32 masters, in place; `location` is the file that describes them.

The file has a section `MASTERS` by checkpoint name, and a section `HELD` with a single number: the version in
the masters, or -1 while the trainer writes to them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from protocol.device.shared_layout import HELD, MASTERS, VERSION, matches_layout
from protocol.device.shared_tensors import map_tensors
from protocol.device.slice_digests import Digests
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.slices import Wanted
from rollout.weights.base import Destination, ReceivedSlice, no_destination, whole_tensor
from rollout.weights.verification import Deadline, version_digest, wait_for_queue


class SharedReceiver:
    """Receiver that yields the masters converted to the manifest's dtypes, and keeps only the mapping."""

    is_persistent = False
    is_lockable = False

    def __init__(self) -> None:
        self.digest = 0
        self._masters: dict[str, torch.Tensor] = {}
        self._held: torch.Tensor | None = None

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        deadline = Deadline(manifest, deadline_s)
        self.close()
        sections = map_tensors(Path(manifest.location))
        try:
            masters, held = sections[MASTERS], sections[HELD][VERSION]
        except KeyError as error:
            raise WeightError(
                f"{manifest.location} has no {error}: it does not describe a trainer's masters"
            ) from error
        digests = Digests()
        for entry in manifest.tensors:
            deadline.remaining(f"reading {entry.name}")
            tensor = _in_dtype(entry, masters, manifest)
            digests.add(tensor)
            yield whole_tensor(entry, tensor)
        digests.launch()
        if any(master.is_cuda for master in masters.values()):
            wait_for_queue(manifest, deadline, lambda: False)
        self.digest = version_digest(manifest, digests.numbers())
        self._masters, self._held = masters, held
        self.masters(manifest)

    def masters(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> master of the last verified version, in the trainer's memory.

        Raises:
            WeightError: no version was verified, or the trainer has started to write to the masters.
        """
        check_held(self._held, manifest)
        return self._masters

    def close(self) -> None:
        """Unmap the trainer's memory; a running `slices` keeps its own mapping until its end."""
        self._masters, self._held = {}, None


def check_held(held: torch.Tensor | None, manifest: WeightManifest) -> None:
    """Check that the trainer's masters still contain a version.

    Args:
        held: version number in the masters, in the trainer's memory; None: not mapped.

    Raises:
        WeightError: the masters no longer contain the version.
    """
    if held is None or int(held) != manifest.version:
        raise WeightError(
            f"version {manifest.version} has been overwritten by the trainer, or the trainer has ended"
        )


def _in_dtype(entry: TensorEntry, masters: dict[str, torch.Tensor], manifest: WeightManifest) -> torch.Tensor:
    master = masters.get(entry.name)
    if master is None or not matches_layout(master, entry.shape):
        found = "absent" if master is None else f"{list(master.shape)} of strides {master.stride()}"
        raise WeightError(
            f"tensor {entry.name} is {list(entry.shape)} in the manifest, {found} in {manifest.location}"
        )
    return (master.to(getattr(torch, entry.dtype)) if master.is_floating_point() else master).reshape(
        entry.shape
    )
