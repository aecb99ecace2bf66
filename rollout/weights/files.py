"""Receives a version from files: `location` is a directory with one file for each bucket."""

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.slices import Wanted
from rollout.weights.base import Destination, ReceivedSlice, no_destination, whole_tensor
from rollout.weights.verification import Deadline, in_buckets, verify, view

MADV_POPULATE_READ = 22
"""Advice of madvise(2) to read all pages at once, which the module mmap does not know yet."""


class FileReceiver:
    """Maps `bucket_00000.bin` ... without copying; a sender may unlink files that are mapped."""

    digest = 0

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        deadline = Deadline(manifest, deadline_s)
        for index, entries in in_buckets(manifest):
            if not entries:
                continue
            bucket = _map(
                Path(manifest.location) / f"bucket_{index:05d}.bin", manifest.buckets[index], entries[0]
            )
            for entry in entries:
                deadline.remaining(f"reading {entry.name}")
                tensor = view(entry, bucket)
                verify(entry, tensor)
                yield whole_tensor(entry, tensor)
        self.digest = manifest.digest

    def close(self) -> None:
        """Return at once: a mapping ends with the last tensor in it."""


def _map(path: Path, nbytes: int, first: TensorEntry) -> torch.Tensor:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < nbytes:
                raise WeightError(
                    f"{path}: {size} bytes, the manifest says {nbytes} (first tensor {first.name})"
                )
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            # ACCESS_COPY: torch requires writable memory. This module never writes to it; writes would be
            # private.
            memory = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
            with suppress(OSError):  # before Linux 5.14 pages come one after the other
                memory.madvise(MADV_POPULATE_READ)
    except OSError as error:
        raise WeightError(f"{path}: {error.strerror or error} (first tensor {first.name})") from error
    return torch.frombuffer(memory, dtype=torch.uint8)
