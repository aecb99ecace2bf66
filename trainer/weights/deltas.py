"""Publishes the changes between versions as files; every so many versions one whole, an anchor.

The newest version stays in host memory, to be compared with the next. A restarted trainer has none and begins
with an anchor, so does the version after one that could not be published. A version is an anchor, too, if it
is older than the newest, or its directory would replace one of the newest one's chain: a trainer that goes
back reaches versions a second time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from msgspec.structs import replace

from protocol.device.changes import coded
from protocol.device.slice_digests import bits_of
from protocol.errors import WeightError
from protocol.messages import WeightLink, WeightManifest
from protocol.weights.deltas import BYTES, INDEX, Delta, TensorChange
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import BucketContents, Named, checked_dtype, fill_buckets
from trainer.weights.version_directories import bucket_path
from trainer.weights.version_writer import RequireSpace, VersionWriter


class DeltaWriter(VersionWriter):
    """Writes the changes since the version before, or all bytes of an anchor."""

    def __init__(self, config: WeightConfig, require_space: RequireSpace) -> None:
        """Begin with an anchor."""
        super().__init__(config, require_space)
        self._anchor_every = config.anchor_every
        self._buckets: list[torch.Tensor] = []
        """The newest version in host memory."""
        self._newest: WeightManifest | None = None
        """Its manifest; None: there is none to compare with, or a version is being written over it."""
        self._base: WeightManifest | None = None
        """Manifest of the version that the one in the making changes; None: that is an anchor."""
        self._changes: list[TensorChange] = []

    def write(self, tensors: Named, version: int, aside: Path, name: str) -> BucketContents:
        """Write the changes or all bytes, see `VersionWriter`; after an error the next one is an anchor."""
        base, self._newest = self._newest, None
        if base is None or self._ends_chain(base, version, name):
            self._base, self._buckets = None, []
            contents = fill_buckets(tensors, self._bucket_bytes, self._allocate)
            self._require_space(sum(contents.buckets))
            for index, nbytes in enumerate(contents.buckets):
                bucket_path(aside, index).write_bytes(self._buckets[index][:nbytes].numpy().data)
            return contents
        self._base, self._changes = base, []
        with (aside / BYTES).open("wb") as file:
            contents = fill_buckets(
                self._coded(tensors, base, file), self._bucket_bytes, lambda index, _: self._buckets[index]
            )
        if len(contents.entries) != len(base.tensors):
            raise WeightError(f"fewer tensors were published than in version {base.version}")
        return contents

    def completed(self, manifest: WeightManifest, aside: Path) -> WeightManifest:
        """Return the manifest of the version that was written, with its chain. Raises OSError."""
        base, name = self._base, Path(manifest.location).name
        if base is None:
            nbytes = sum(manifest.buckets)
        else:
            delta = Delta(base=base.digest, digest=manifest.digest, changes=tuple(self._changes))
            (aside / INDEX).write_bytes(msgspec.msgpack.encode(delta))
            nbytes = (aside / BYTES).stat().st_size
        links = base.chain if base else ()
        return replace(manifest, chain=(*links, WeightLink(name, manifest.digest, nbytes)))

    def published(self, manifest: WeightManifest) -> None:
        """Compare the next version with this one."""
        self._newest = manifest

    def _ends_chain(self, base: WeightManifest, version: int, name: str) -> bool:
        """Return whether a version must not be written as changes of this one."""
        replaced = any(link.directory == name for link in base.chain)
        return len(base.chain) >= self._anchor_every or version < base.version or replaced

    def _allocate(self, index: int, size: int) -> torch.Tensor:
        self._buckets.append(torch.empty(size, dtype=torch.uint8))
        return self._buckets[index]

    def _coded(
        self, tensors: Named, base: WeightManifest, file: BinaryIO
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Write the changes of each tensor, and yield it to be copied over its bytes in the base."""
        for number, (name, tensor) in enumerate(tensors):
            entry = base.tensors[min(number, len(base.tensors) - 1)]
            facts = (name, checked_dtype(name, tensor), tuple(tensor.shape))
            if facts != (entry.name, entry.dtype, entry.shape):
                raise WeightError(f"tensor {name} was not published so in version {base.version}")
            new = tensor.detach().cpu().contiguous()
            old = self._buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes]
            found = coded(bits_of(old.view(new.dtype)), bits_of(new.view(-1)))
            if found.elements:
                self._changes.append(TensorChange(number, found.width, found.elements, file.tell()))
                file.write(found.data.numpy().data)
            yield name, new
