"""Writes one rank's pieces of each version: all bytes into shared buckets, or into a file per rank."""

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import torch

from protocol.device.changes import Changes, encode_changes
from protocol.device.slice_digests import SliceSums, bits_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest, WeightPiece
from protocol.weights.boxes import relative, whole
from protocol.weights.deltas import TensorChange, changes_name
from protocol.weights.piece_rows import PieceRows
from trainer.hosts.place import SEE_S
from trainer.weights.bucket_writer import Named, drain
from trainer.weights.part_layout import PartReport, checked_pieces
from trainer.weights.version_directories import bucket_path

PAUSE_S = 0.1
"""Polling interval for a file to appear, seconds."""


class PartOrder(msgspec.Struct, frozen=True):
    """Rank 0's order to the other ranks for a version."""

    directory: str
    """Directory of the version, in the versions' directory that each rank knows; empty: no version is
    published."""
    own_files: bool = False
    """Whether each rank writes to a file of its own; otherwise all ranks write to the buckets."""
    changes: bool = False
    """Whether these files contain only changes since the previous version."""


class PartFiles:
    """One rank's pieces in the files of versions."""

    def __init__(self, blank: WeightManifest, rank: int, *, keeps: bool) -> None:
        """Create the writer of versions with the layout of `blank_manifest`.

        Args:
            keeps: whether to keep the pieces of the newest version in host memory, for comparison with the
                next version.
        """
        self.rows = PieceRows(blank)
        """Positions of the sums."""
        self._blank, self._rank, self._keeps = blank, rank, keeps
        self._held: dict[int, torch.Tensor] = {}
        """Index of a piece -> its elements in the last written version."""

    def write(self, tensors: Named, order: PartOrder, root: Path) -> PartReport:
        """Write and digest the pieces of a version; buckets already exist with their sizes.

        Args:
            order: order of rank 0; changes must refer to the last written version.
            root: directory of the versions, as a path on this host.

        Returns:
            The sums and the changes, or why the part could not be written.
        """
        directory, changes = root / order.directory, list[TensorChange]()
        spans, sums, position = self.rows.pieces[self._rank], None, 0
        bucket, memory = -1, torch.empty(0, dtype=torch.uint8)
        try:
            with ExitStack() as stack:
                name = changes_name(self._rank)
                file = stack.enter_context(_opened(directory / name, "wb")) if order.own_files else None
                for number, (piece, tensor) in enumerate(checked_pieces(self._blank, self._rank, tensors)):
                    entry, (first, end) = self._blank.tensors[piece.tensor], spans[number]
                    sums = sums or SliceSums(sum(last - begin for begin, last in spans), tensor.device)
                    sums.add(tensor.detach(), entry.shape, piece.box, position - first)
                    position += end - first
                    if file is None and tensor.numel():
                        if entry.bucket != bucket:
                            bucket, memory = entry.bucket, mapped(bucket_path(directory, entry.bucket))
                        _place(memory, self._blank, piece).copy_(tensor.detach())
                    if not self._keeps and file is None:
                        continue
                    elements = tensor.detach().cpu().contiguous()
                    if file is not None:
                        old = self._held[number] if order.changes else None
                        changes += self._written(file, piece, elements, old)
                    if self._keeps:
                        self._keep_elements(number, elements)
                nbytes = 0
                if file is not None:
                    nbytes = file.tell()
                    file.flush()
                    os.fsync(file.fileno())  # rank 0, possibly on another host, syncs only its own files
        except (WeightError, OSError) as error:
            drain(tensors)
            return PartReport("", f"rank {self._rank}: {error}", b"")
        if sums is not None:
            sums.launch()
        found = b"" if sums is None else sums.total.cpu().numpy().tobytes()
        return PartReport("", "", found, tuple(changes), nbytes)

    def _written(
        self, file: BinaryIO, piece: WeightPiece, elements: torch.Tensor, old: torch.Tensor | None
    ) -> list[TensorChange]:
        """Write the changes of a piece, or all of it if `old` is None; return their position, if any."""
        new = bits_of(elements).view(-1)
        found = Changes.all_of(new) if old is None else encode_changes(bits_of(old).view(-1), new)
        if not found.elements:
            return []
        offset = file.tell()
        file.write(found.data.numpy().data)
        box = () if piece.box == whole(self._blank.tensors[piece.tensor].shape) else piece.box
        return [TensorChange(piece.tensor, found.width, found.elements, offset, self._rank, box)]

    def _keep_elements(self, number: int, elements: torch.Tensor) -> None:
        if number in self._held:
            self._held[number].copy_(elements)
        else:
            self._held[number] = elements.clone()  # the elements may be the model's memory


def check_files(directory: Path, reports: Sequence[PartReport]) -> None:
    """Check that rank 0's host sees the complete file of each rank.

    Raises:
        OSError: a file is missing.
        WeightError: a file has a different size.
    """
    for rank, report in enumerate(reports):
        name = changes_name(rank)
        with _opened(directory / name, "rb") as file:
            if (size := file.seek(0, 2)) != report.nbytes:
                raise WeightError(f"rank {rank} wrote {report.nbytes} bytes to {name}, rank 0 sees {size}")


def _opened(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    """Open a file; wait for it, because network file systems may show another host's file late."""
    end = time.monotonic() + SEE_S
    while True:
        try:
            return path.open(mode)
        except FileNotFoundError:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE_S)


def mapped(bucket: Path) -> torch.Tensor:
    """Return a file as a writable uint8 tensor."""
    with bucket.open("rb+") as file:
        size = file.seek(0, 2)
        memory = mmap.mmap(file.fileno(), size) if size else bytearray()
    return torch.frombuffer(memory, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _place(bucket: torch.Tensor, blank: WeightManifest, piece: WeightPiece) -> torch.Tensor:
    """Return a view of a piece in its bucket."""
    entry = blank.tensors[piece.tensor]
    raw = bucket[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)[relative(piece.box, whole(entry.shape))]
