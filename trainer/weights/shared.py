"""Publishes the location of the trainer's fp32 masters without copying, for one engine on the same device.

`location` is the file that describes the masters' memory. The engine converts the masters into its live
weights. The masters must therefore not change between `publish` and the moment when the engine serves the
version. `invalidate` announces the next change.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from protocol.device.shared_layout import HELD, MASTERS, TRANSPORT, VERSION, description_file, matches_layout
from protocol.device.shared_tensors import SharedTensors
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import BucketContents, EntryBuilder, Named, drain, make_manifest

NOT_HELD = -1
UNLIMITED_BYTES = 1 << 62
"""Size of the only bucket, which exists only in the manifest."""


class SharedSender(WeightSender):
    """Sender that moves the masters to memory that the engine can map, and publishes their version."""

    in_parts = False

    def __init__(
        self,
        run_dir: Path,
        masters: Mapping[str, torch.Tensor],
        parts: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Move the masters to shareable memory.

        Args:
            masters: dense tensors; they stay the same objects.
            parts: returns checkpoint name -> part of a master, see `matches_layout`; default: each master is
                one tensor of the checkpoint.

        Raises:
            WeightError: on a CPU, the memory is insufficient; the masters stay where they are.
        """
        self._run_dir = run_dir
        held = torch.tensor(NOT_HELD)
        self._memory = SharedTensors([held, *masters.values()])
        self._held, *moved = self._memory.tensors
        for master, tensor in zip(masters.values(), moved, strict=True):
            master.data = tensor
        self._parts = (
            dict(zip(masters, moved, strict=True))
            if parts is None
            else {name: part.detach() for name, part in parts().items()}
        )
        self._path: Path | None = None

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        """Publish the version in the masters.

        `tensors` are the masters converted to the engine's dtype; they are digested and not kept.
        """
        self.invalidate()
        path = description_file(self._run_dir, f"trainer.{epoch}")
        try:
            if path != self._path:
                self._memory.write(path, {MASTERS: self._parts, HELD: {VERSION: self._held}})
                self._path = path
            contents = _digested(tensors, self._parts)
        except WeightError as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        manifest = make_manifest(TRANSPORT, str(path), epoch, version, contents, base_model=base_model)
        self._held.fill_(version)
        return manifest

    def invalidate(self) -> None:
        """Withdraw the version before the masters change; engines no longer read it."""
        self._held.fill_(NOT_HELD)

    def retire(self, in_use: frozenset[int]) -> None:
        """Return at once: only one version exists at a time."""

    def close(self) -> None:
        """Withdraw the version and remove the description; the masters stay usable in this process."""
        self.invalidate()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._memory.close()


def _digested(tensors: Named, parts: Mapping[str, torch.Tensor]) -> BucketContents:
    """Return the entries of the tensors, in one bucket that exists only in the manifest."""
    builder = EntryBuilder(UNLIMITED_BYTES)
    for name, tensor in tensors:
        if name not in parts or not matches_layout(parts[name], tuple(tensor.shape)):
            raise WeightError(f"tensor {name} is not one of the masters")
        builder.place(name, tensor)
        builder.digest(tensor)
    return builder.finish()
