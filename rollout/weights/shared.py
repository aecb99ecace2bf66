"""Reads a version out of the trainer's fp32 masters, where they lie: `location` is the file that describes
their memory.

Two sections of it: `MASTERS` by checkpoint name, and the one number of `HELD`, the version that the masters
are for as long as the trainer does not write to them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from protocol.device.shared_layout import HELD, MASTERS, VERSION, matches_layout
from protocol.device.shared_tensors import map_tensors
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.base import Destination, no_destination
from rollout.weights.verification import Deadline, Verification


class SharedReceiver:
    """Yields the masters in the manifest's dtypes, converted one after the other; nothing of the version is
    kept but the mapping."""

    def __init__(self) -> None:
        self.digest = 0
        self._masters: dict[str, torch.Tensor] = {}
        self._held: torch.Tensor | None = None

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        deadline = Deadline(manifest, deadline_s)
        self.close()
        found = map_tensors(Path(manifest.location))
        try:
            masters, held = found[MASTERS], found[HELD][VERSION]
        except KeyError as error:
            raise WeightError(
                f"{manifest.location} has no {error}: it does not describe a trainer's masters"
            ) from error
        check = Verification(manifest)
        for entry in manifest.tensors:
            deadline.remaining(f"reading {entry.name}")
            tensor = _in_dtype(entry, masters, manifest)
            check.add(entry, tensor)
            yield entry, tensor
        self.digest = check.finish(deadline)
        self._masters, self._held = masters, held
        self.masters(manifest)

    def masters(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """The masters of the version that was verified last, by checkpoint name, where and as the trainer has
        them.

        Raises:
            WeightError: none was, or the trainer has begun to write to them.
        """
        if self._held is None or int(self._held) != manifest.version:
            raise WeightError(
                f"version {manifest.version} is not held by the trainer any more: it works on the next one, or has ended"
            )
        return self._masters

    def close(self) -> None:
        """Let go of the trainer's memory; what a `tensors` that runs has mapped it keeps to its end."""
        self._masters, self._held = {}, None


def _in_dtype(entry: TensorEntry, masters: dict[str, torch.Tensor], manifest: WeightManifest) -> torch.Tensor:
    master = masters.get(entry.name)
    if master is None or not matches_layout(master, entry.shape):
        there = "absent" if master is None else f"{list(master.shape)} of strides {master.stride()}"
        raise WeightError(
            f"tensor {entry.name} is {list(entry.shape)} in the manifest, {there} in {manifest.location}"
        )
    return (master.to(getattr(torch, entry.dtype)) if master.is_floating_point() else master).reshape(
        entry.shape
    )
