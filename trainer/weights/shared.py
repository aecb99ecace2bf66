"""Publishes where the trainer's fp32 masters lie: `location` is the file that describes their memory, and
nothing is copied.

The engine converts them into its live weights by itself. So the masters must not be written to between
`publish` and the moment in which the engine serves the version; `withdraw` says that they will be.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from protocol.device.digests import Digests
from protocol.device.shared_layout import HELD, MASTERS, TRANSPORT, VERSION, description_file, matches_layout
from protocol.device.shared_tensors import SharedTensors
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import DTYPE_BYTES
from trainer.weights.bucket_writer import BucketWriter, Named, drain, make_manifest

NOT_HELD = -1


class SharedSender:
    """Brings the masters to memory that the engine can map, and says which version they are."""

    def __init__(
        self,
        run_dir: Path,
        masters: Mapping[str, torch.Tensor],
        parts: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Bring the masters there.

        Args:
            masters: dense; they stay the same objects.
            parts: what of them is which tensor, by checkpoint name, see `matches_layout`; by default each
                is one.

        Raises:
            WeightError: on a CPU, if there is no memory for them; nothing changed.
        """
        self._run_dir = run_dir
        held = torch.tensor(NOT_HELD)
        self._room = SharedTensors([held, *masters.values()])
        self._held, *moved = self._room.tensors
        for master, tensor in zip(masters.values(), moved, strict=True):
            master.data = tensor
        self._parts = (
            dict(zip(masters, moved, strict=True))
            if parts is None
            else {name: part.detach() for name, part in parts().items()}
        )
        self._path: Path | None = None

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        """`tensors`: what the masters make in the engine's dtype; each is let go when it has been hashed."""
        self.invalidate()
        path = description_file(self._run_dir, f"trainer.{epoch}")
        try:
            if path != self._path:
                self._room.write(path, {MASTERS: self._parts, HELD: {VERSION: self._held}})
                self._path = path
            layout = _digested(tensors, self._parts)
        except WeightError as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        manifest = make_manifest(
            TRANSPORT, str(path), epoch, version, layout, base_model=base_model, tied=tied
        )
        self._held.fill_(version)
        return manifest

    def invalidate(self) -> None:
        """The masters are about to be written to: no engine may take what it finds in them for a version,
        until the next one."""
        self._held.fill_(NOT_HELD)

    def retire(self, in_use: frozenset[int]) -> None:
        """Nothing to do: there is one version at a time."""

    def close(self) -> None:
        """Withdraw, and remove the description; the masters stay usable here."""
        self.invalidate()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._room.close()


def _digested(
    tensors: Named, parts: Mapping[str, torch.Tensor]
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries and the size of the one bucket in which, for the manifest alone, the tensors lie behind each
    other."""
    layout = BucketWriter(1 << 62)
    placed: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
    digests = Digests()
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise WeightError(f"tensor {name}: dtype {dtype!r} cannot be sent")
        if name not in parts or not matches_layout(parts[name], tuple(tensor.shape)):
            raise WeightError(f"tensor {name} is not one of the masters")
        placed.append((name, dtype, tuple(tensor.shape), *layout.place(name, tensor.nbytes), tensor.nbytes))
        digests.add(tensor)
    if not placed:
        raise WeightError("a version without tensors cannot be published")
    return tuple(
        TensorEntry(*facts, number) for facts, number in zip(placed, digests.numbers(), strict=True)
    ), tuple(layout.buckets)
