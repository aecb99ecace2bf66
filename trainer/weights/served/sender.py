"""Keeps one rank's part of the current version, and serves slices of it to engine ranks.

A version is copied and digested on the device of its pieces. Rank 0 collects the sums of the pieces, a few
bytes per 64 KiB, and creates the manifest. A trainer of one rank publishes one part.
"""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from protocol.device.bounded_init import check_stuck
from protocol.device.slice_digests import SliceSums
from protocol.errors import WeightError
from protocol.host.key_proof import SenderKeys
from protocol.messages import WeightDraft, WeightManifest
from protocol.weights.piece_rows import PieceRows
from trainer.config import WeightConfig
from trainer.ranks.collectives import broadcast_bool, gather_bytes
from trainer.weights.bucket_writer import Named, drain
from trainer.weights.part_layout import PartReport, checked_pieces, complete_manifest
from trainer.weights.served.memory import MEMORIES
from trainer.weights.served.version_server import ServedVersion, VersionServer

_decoder = msgspec.msgpack.Decoder(PartReport)


class PartSender:
    """Sender of one rank's part; see `WeightSender`."""

    def __init__(
        self, config: WeightConfig, rank: int, blank: WeightManifest, keys: SenderKeys | None = None
    ) -> None:
        """Start to listen on a free port of `config.host`.

        Args:
            rank: rank of this process, below the number of parts.
            keys: as in `VersionServer`.

        Raises:
            SettingsError: `config.backend` is unknown, or unsupported here.
            WeightError: the sender cannot listen on the address.
        """
        self.rank = rank
        """Rank of this process."""
        self.in_parts = len(blank.parts) > 1
        self._blank = blank
        self._sends_changes = config.delta
        self._rows = PieceRows(blank)
        self._memory = MEMORIES[config.transport](config, self._blank, rank)
        self._filled_manifest = self._blank
        """Manifest of the last `fill`, without digests."""
        self._filled: ServedVersion | None = None
        self._server = VersionServer(config, self._memory.channel, keys)

    @property
    def location(self) -> str:
        """HOST:PORT/WHERE of this rank; WHERE is the process group's backend or the memory's device."""
        return f"{self._server.address}/{self._memory.where}"

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """See `WeightSender`; afterwards every rank accepts requests."""
        draft = self.draft(epoch, version)
        self._wait_for_all()
        return draft

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        """Publish this rank's pieces; see `WeightSender`."""
        report = self.fill(epoch, version, tensors)
        reports = [report]
        if self.in_parts:
            reports = [_decoder.decode(data) for data in gather_bytes(msgspec.msgpack.encode(report))]
        manifest, problem = self._filled_manifest, None
        if reports:
            try:
                manifest = self.collect(reports, base_model=base_model)
            except WeightError as error:
                problem = error
        self.serve_or_discard(broadcast_bool(problem is None) if self.in_parts else problem is None)
        self._wait_for_all()  # rank 0 announces the version only when every rank serves it
        if problem is not None:
            raise problem
        return manifest

    def draft(self, epoch: str, version: int) -> WeightDraft | None:
        """Accept requests for this rank's part of the version of the next `fill`."""
        before = self._server.current
        if not self._memory.can_draft or before is None or before.manifest.epoch != epoch:
            return None
        self._cancel()
        self._server.provisional = self._new(replace(self._blank, epoch=epoch, version=version))
        return WeightDraft(epoch=epoch, version=version, like=before.manifest.version)

    def fill(self, epoch: str, version: int, tensors: Named) -> PartReport:
        """Copy and digest this rank's pieces, which may be overwritten afterwards.

        The version is served once `serve_or_discard` accepts it, and before to receivers that know its draft.
        """
        self._filled_manifest = replace(self._blank, epoch=epoch, version=version)
        try:
            try:
                sums = self._copied(self._version_to_fill(epoch, version), tensors)
            except (WeightError, torch.OutOfMemoryError) as error:
                drain(tensors)
                return PartReport(self.location, f"rank {self.rank}: {error}", b"")
        except BaseException:  # an export may fail while it is drained
            self._cancel()
            raise
        return PartReport(self.location, "", sums)

    def collect(self, reports: Sequence[PartReport], *, base_model: str) -> WeightManifest:
        """Create the manifest of the filled version, on rank 0.

        Raises:
            WeightError: a rank failed to create its part; the message names the first such rank.
        """
        if problem := next((report.error for report in reports if report.error), ""):
            raise WeightError(f"version {self._filled_manifest.version}: {problem}")
        assert self._filled is not None
        sums = [np.frombuffer(report.sums, np.int64) for report in reports]
        locations = [report.location for report in reports]
        digests = self._rows.digests(sums)
        manifest = complete_manifest(self._filled_manifest, digests, locations, base_model=base_model)
        self._filled.collected.add([torch.from_numpy(part.copy()) for part in sums])
        return manifest

    def serve_or_discard(self, accepted: bool) -> None:
        """Serve the filled version if `accepted`; otherwise discard it and keep the previous version."""
        if not accepted:
            self._cancel()
            return
        assert self._filled is not None
        self._memory.published()
        self._server.current, self._server.provisional, self._filled = self._filled, None, None

    def retire(self, in_use: frozenset[int]) -> None:
        """Return at once: memory of versions that are no longer needed is reused."""

    def close(self) -> None:
        """Stop listening and disconnect every receiver; idempotent."""
        self._cancel()
        self._server.close()
        self._memory.close()

    def _wait_for_all(self) -> None:
        if self.in_parts:
            gather_bytes(b"")

    def _version_to_fill(self, epoch: str, version: int) -> ServedVersion:
        """Return the version's draft if it exists, else a version without pieces."""
        check_stuck()
        served = self._server.provisional
        if served is None or (served.manifest.epoch, served.manifest.version) != (epoch, version):
            self._cancel()
            served = self._new(self._filled_manifest)
        self._filled = served
        return served

    def _new(self, manifest: WeightManifest) -> ServedVersion:
        """Return a version without pieces; with `weights.delta`, the current version is its base."""
        current = self._server.current
        if not self._sends_changes or current is None:
            return self._memory.new(manifest)
        # Release the version before the current one, so as many versions exist as without deltas.
        current = self._server.current = dataclasses.replace(current, base=None)
        return dataclasses.replace(self._memory.new(manifest), base=current)

    def _copied(self, served: ServedVersion, tensors: Named) -> bytes:
        """Copy and digest all pieces in one pass; return their sums."""
        spans = self._rows.pieces[self.rank]
        sums, position = SliceSums(sum(end - first for first, end in spans), self._memory.device), 0
        copies: list[torch.Tensor] = []
        for number, (piece, tensor) in enumerate(checked_pieces(self._blank, self.rank, tensors)):
            entry = self._blank.tensors[piece.tensor]
            first, end = spans[number]
            copies.append(self._memory.piece(served, number))
            sums.add(tensor.detach(), entry.shape, piece.box, position - first, copies[-1])
            position += end - first
            if sums.is_launched:
                served.streamed.add(copies)
                copies = []
        sums.launch()
        served.streamed.add(copies)
        served.streamed.fail()  # no pieces follow
        return sums.total.cpu().numpy().tobytes()

    def _cancel(self) -> None:
        """Disconnect the receivers of a version that is not served yet, if any."""
        for served in (self._server.provisional, self._filled):
            if served is not None:
                served.streamed.fail()
                served.collected.fail()
        self._server.provisional = self._filled = None
