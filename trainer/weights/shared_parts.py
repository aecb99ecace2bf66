"""Publishes the location of fp32 masters on several trainer ranks, as `shared.py` does for one rank.

Each rank describes its masters in a file, and digests its pieces. Rank 0 shares the sums of all ranks. Each
engine rank compares the masters of the same trainer rank with these sums.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from protocol.device.shared_layout import (
    HELD,
    MASTERS,
    PIECES,
    SUMS,
    TRANSPORT,
    VERSION,
    description_file,
    rank_file,
)
from protocol.device.shared_tensors import SharedTensors
from protocol.device.slice_digests import SliceSums
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.piece_rows import PieceRows
from trainer.ranks.collectives import broadcast_bool, gather_bytes
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import Named, drain
from trainer.weights.part_layout import PartReport, checked_pieces, complete_manifest
from trainer.weights.shared import NOT_HELD

_decoder = msgspec.msgpack.Decoder(PartReport)


class SharedPartSender(WeightSender):
    """Sender of one rank's masters, in memory that the same rank of the engine can map."""

    in_parts = True

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        blank: WeightManifest,
        masters: Mapping[str, torch.Tensor],
        parts: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Move the masters to shareable memory.

        Args:
            masters: parameter of this rank -> its master; the masters stay the same objects.
            parts: returns checkpoint name -> part of the tensor in a master of this rank.

        Raises:
            WeightError: on a CPU, the memory is insufficient; the masters stay where they are.
        """
        self._run_dir, self._rank, self._blank = run_dir, rank, blank
        self._rows = PieceRows(blank)
        spans = [span for part in self._rows.pieces for span in part]
        sums = torch.zeros(sum(end - first for first, end in spans), dtype=torch.int64)
        self._memory = SharedTensors([torch.tensor(NOT_HELD), sums, *masters.values()])
        self._held, self._sums, *moved = self._memory.tensors
        for master, tensor in zip(masters.values(), moved, strict=True):
            master.data = tensor
        self._parts = {name: part.detach() for name, part in parts().items()}
        self._files: list[Path] = []
        """Description files of this epoch."""

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        """Publish the version in the masters; `tensors` are this rank's pieces."""
        self.invalidate()
        blank = replace(self._blank, epoch=epoch, version=version, transport=TRANSPORT)
        report = self._report(epoch, tensors)
        reports = [_decoder.decode(data) for data in gather_bytes(msgspec.msgpack.encode(report))]
        manifest, problem = blank, next((found.error for found in reports if found.error), "")
        if reports and not problem:
            sums = [np.frombuffer(found.sums, np.int64) for found in reports]
            locations = [found.location for found in reports]
            complete = complete_manifest(blank, self._rows.digests(sums), locations, base_model=base_model)
            manifest = replace(complete, location=str(self._files[-1]))
            self._sums.copy_(torch.from_numpy(np.concatenate(sums)))
            self._held.fill_(version)
        if not broadcast_bool(not problem) and problem:
            raise WeightError(f"version {version}: {problem}")
        return manifest

    def invalidate(self) -> None:
        """Withdraw the version before the masters change; engines no longer read it.

        Engine ranks read the version from rank 0, which commands the other ranks afterwards.
        """
        self._held.fill_(NOT_HELD)

    def retire(self, in_use: frozenset[int]) -> None:
        """Return at once: only one version exists at a time."""

    def close(self) -> None:
        """Withdraw the version and remove the descriptions; the masters stay usable in this process."""
        self.invalidate()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._memory.close()

    def _report(self, epoch: str, tensors: Named) -> PartReport:
        """Describe the masters, and digest this rank's pieces.

        Version and sums have a separate file, because all engine ranks map it, while only one engine rank
        uses the masters' GPU.
        """
        path = rank_file(description_file(self._run_dir, f"trainer.{epoch}"), self._rank)
        try:
            if path not in self._files:
                sums = description_file(self._run_dir, f"trainer.{epoch}.sums")
                self._memory.write(path, {MASTERS: self._parts})
                if not self._rank:
                    self._memory.write(sums, {HELD: {VERSION: self._held}, SUMS: {PIECES: self._sums}})
                self._files = [path] if self._rank else [path, sums]
            return PartReport(str(path), "", self._digested(tensors))
        except WeightError as error:
            drain(tensors)
            return PartReport(str(path), f"rank {self._rank}: {error}", b"")

    def _digested(self, tensors: Named) -> bytes:
        spans = self._rows.pieces[self._rank]
        device = next(iter(self._parts.values())).device
        sums, position = SliceSums(sum(end - first for first, end in spans), device), 0
        pieces = checked_pieces(self._blank, self._rank, tensors)
        for (piece, tensor), (first, end) in zip(pieces, spans, strict=True):
            shape = self._blank.tensors[piece.tensor].shape
            sums.add(tensor.detach().contiguous(), shape, piece.box, position - first)
            position += end - first
        sums.launch()
        return sums.total.cpu().numpy().tobytes()
