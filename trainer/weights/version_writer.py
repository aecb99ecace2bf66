"""Writes the files of a version, from one process or from all ranks at once."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.provisional import with_digests
from trainer.config import WeightConfig
from trainer.ranks.collectives import broadcast_message, gather_bytes, next_message
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import BucketContents, Named, drain, fill_buckets
from trainer.weights.deltas import VersionChain
from trainer.weights.part_files import PartFiles, PartOrder, check_files, mapped
from trainer.weights.part_layout import PartReport
from trainer.weights.version_directories import bucket_path, versions_in

RequireSpace = Callable[[int], None]
"""Takes a number of bytes; raises WeightError if the free space is insufficient."""
NO_VERSION = PartOrder("")


class VersionWriter:
    """Writer that copies each tensor into a mapped file and digests it there, in one pass."""

    def __init__(self, config: WeightConfig, require_space: RequireSpace) -> None:
        """Create a writer of buckets of `config.bucket_mb`."""
        self._bucket_bytes = config.bucket_mb << 20
        self._require_space = require_space
        self._last_bytes = 0

    def write(self, tensors: Named, version: int, aside: Path, name: str) -> BucketContents:
        """Write the bytes of a version into its directory.

        Args:
            aside: empty directory to write to.

        Raises:
            OSError: a file cannot be written.
            WeightError: a tensor cannot be published; the message names the tensor.
        """
        self._require_space(self._last_bytes)

        def allocate(index: int, size: int) -> torch.Tensor:
            return mapped(_created(bucket_path(aside, index), size))

        def reserve(index: int, offset: int, nbytes: int) -> None:
            self._reserve(bucket_path(aside, index), offset, nbytes)

        contents = fill_buckets(tensors, self._bucket_bytes, allocate, reserve)
        for index, nbytes in enumerate(contents.buckets):
            os.truncate(bucket_path(aside, index), nbytes)
        return contents

    def completed(self, manifest: WeightManifest, aside: Path) -> WeightManifest:
        """Return the manifest of the written version, with everything that engines need to read it."""
        return manifest

    def published(self, manifest: WeightManifest) -> None:
        """Record that engines can read a version."""
        self._last_bytes = sum(manifest.buckets)

    def failed(self) -> None:
        """Record that the version is not published, possibly before `write` was called."""

    def _reserve(self, bucket: Path, offset: int, nbytes: int) -> None:
        """Allocate pages before writing, because writing to a page that cannot be allocated raises SIGBUS."""
        self._require_space(nbytes)
        with bucket.open("rb+") as file:
            os.posix_fallocate(file.fileno(), offset, nbytes)


class PartWriter(VersionWriter):
    """Rank 0's writer of versions in which each rank writes its own pieces; a single rank writes all pieces.

    Rank 0 creates the buckets and sends their directory to the other ranks. Each rank copies its pieces into
    the mapped files, or writes changes to a file of its own, and sends their sums to rank 0.
    """

    def __init__(
        self,
        config: WeightConfig,
        require_space: RequireSpace,
        blank: WeightManifest,
        *,
        per_rank_files: bool,
    ) -> None:
        """Create the writer.

        Args:
            require_space: raises WeightError if the free space is insufficient for a number of bytes.
            per_rank_files: whether each rank writes to files of its own.
        """
        super().__init__(config, require_space)
        self._blank, self._per_rank_files = blank, per_rank_files
        self._files = PartFiles(blank, 0, keeps=config.delta)
        self._chain: VersionChain | None = None
        if config.delta or per_rank_files:
            self._chain = VersionChain(
                config.anchor_every if config.delta else 1, per_rank_files=per_rank_files
            )
        self._reports: list[PartReport] = []
        """Reports of the ranks about the last written version."""
        self._order_sent = False
        """Whether the other ranks have received an order for the version."""

    def write(self, tensors: Named, version: int, aside: Path, name: str) -> BucketContents:
        changes = self._chain is not None and self._chain.begin(version, name)
        # hosts may mount the directory under different paths; in shared memory only rank 0 knows it
        order = PartOrder(
            aside.name if self._per_rank_files else str(aside), changes or self._per_rank_files, changes
        )
        if not changes:
            self._require_space(sum(self._blank.buckets))
        if not order.own_files:
            for index, nbytes in enumerate(self._blank.buckets):
                bucket = _created(bucket_path(aside, index), nbytes)
                if nbytes:
                    self._reserve(bucket, 0, nbytes)
        self._send_order(order)
        self._reports = self._gathered(self._files.write(tensors, order, aside.parent))
        if problem := next((report.error for report in self._reports if report.error), ""):
            raise WeightError(f"version {version}: {problem}")
        if order.own_files:
            check_files(aside, self._reports)
        sums = [np.frombuffer(report.sums, np.int64) for report in self._reports]
        digests = self._files.rows.digests(sums)
        return BucketContents(with_digests(self._blank, digests).tensors, self._blank.buckets)

    def completed(self, manifest: WeightManifest, aside: Path) -> WeightManifest:
        return manifest if self._chain is None else self._chain.completed(manifest, aside, self._reports)

    def published(self, manifest: WeightManifest) -> None:
        self._order_sent = False
        if self._chain is not None:
            self._chain.published(manifest)

    def failed(self) -> None:
        if not self._order_sent:
            self._send_order(NO_VERSION)
        self._order_sent = False

    def _send_order(self, order: PartOrder) -> None:
        self._order_sent = True
        if len(self._blank.parts) > 1:
            broadcast_message(msgspec.msgpack.encode(order))

    def _gathered(self, report: PartReport) -> list[PartReport]:
        """Return the reports of all ranks."""
        if len(self._blank.parts) == 1:
            return [report]
        return [
            msgspec.msgpack.decode(data, type=PartReport)
            for data in gather_bytes(msgspec.msgpack.encode(report))
        ]


class PartFollower(WeightSender):
    """Sender of a rank other than 0, which writes its pieces on rank 0's orders."""

    in_parts = True

    def __init__(self, config: WeightConfig, run_dir: Path, rank: int, blank: WeightManifest) -> None:
        """Create the writer of this rank's pieces, with the layout of `blank_manifest`."""
        self._blank, self._files = blank, PartFiles(blank, rank, keeps=config.delta)
        self._root = versions_in(config, run_dir)

    def publish(self, epoch: str, version: int, tensors: Named, *, base_model: str = "") -> WeightManifest:
        order = msgspec.msgpack.decode(next_message(), type=PartOrder)
        if order == NO_VERSION:
            drain(tensors)
        else:
            gather_bytes(msgspec.msgpack.encode(self._files.write(tensors, order, self._root)))
        return self._blank

    def retire(self, in_use: frozenset[int]) -> None:
        """Return at once: rank 0 removes versions."""

    def close(self) -> None:
        """Return at once: rank 0 owns the versions."""


def _created(bucket: Path, size: int) -> Path:
    """Create a sparse file of `size` bytes and return its path."""
    with bucket.open("xb+") as file:
        os.truncate(file.fileno(), size)
    return bucket
