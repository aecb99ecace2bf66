"""The trainer's side for a model that has no room beside the engine: it holds no tensor, and needs no GPU.

A version's tensors are parts of one pool of random numbers. Threads digest them and write them to the files
of the transport `shm`, and a version is removed as soon as the engine serves it: host memory holds one.
"""

import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.messages import TensorEntry
from protocol.weights.buckets import BucketLayout, bucket_name
from protocol.weights.digests import digest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import BucketContents, make_manifest

POOL = 1 << 25
"""Random numbers that all tensors are parts of."""
STRIDE = 9973
"""Numbers between the parts of two tensors, or of one tensor in two versions."""
UNLOCK_S = 30.0
"""Most time in which an engine releases the pages of a version that it serves."""
THREADS = min(12, len(os.sched_getaffinity(0)))


class HostTrainer:
    """Publishes versions from host memory. Each public method is an order, as those of `Trainer`."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._dtype = dtype
        self._shapes = list(checkpoint_shapes(model_dir).items())
        generator = torch.Generator().manual_seed(0)
        pool = torch.empty(POOL).normal_(std=0.02, generator=generator).to(getattr(torch, dtype))
        self._itemsize = pool.element_size()
        self._pool = pool.view(torch.uint8).numpy()
        self._layout = BucketLayout(WeightConfig().bucket_mb << 20)
        self._places = [
            self._layout.place(name, self._itemsize * int(np.prod(shape))) for name, shape in self._shapes
        ]
        self._room = tempfile.TemporaryDirectory(
            prefix="tether-bench-trainer-", dir="/dev/shm", ignore_cleanup_errors=True
        )

    def describe(self) -> dict[str, Any]:
        """Return the bytes of the weights, and name and shape of each tensor."""
        return {"bytes": sum(self._layout.buckets), "shapes": self._shapes}

    def open(self, transport: str, bucket_mb: int) -> dict[str, Any]:
        """Refuse other transports, and another size of buckets."""
        if transport != "shm" or bucket_mb:
            raise ValueError("a trainer without tensors publishes by shm, in buckets of the default's size")
        return {}

    def step(self) -> dict[str, Any]:
        """Return the time: a step changes the part of the pool."""
        self._began = time.monotonic()
        return {"began": self._began}

    def draft(self, version: int) -> dict[str, Any]:
        """Return that versions come as files alone."""
        return {"drafted": False}

    def publish(self, version: int) -> dict[str, Any]:
        """See `Trainer.publish`."""
        directory = Path(self._room.name, f"v{version}")
        directory.mkdir()
        free = shutil.disk_usage(directory).free
        if free < sum(self._layout.buckets):
            raise OSError(f"{directory} has {free >> 20} MiB free, too few for a version: use --layers")
        for index, nbytes in enumerate(self._layout.buckets):
            with Path(directory, bucket_name(index)).open("wb") as file:
                os.truncate(file.fileno(), nbytes)
        with ThreadPoolExecutor(THREADS) as threads:
            entries = threads.map(
                lambda number: self._write(directory, version, number), range(len(self._places))
            )
            contents = BucketContents(tuple(entries), tuple(self._layout.buckets))
        manifest = make_manifest("shm", str(directory), "bench", version, contents, base_model="")
        encoded = msgspec.msgpack.encode(manifest).hex()
        return {"began": self._began, "ended": time.monotonic(), "manifest": encoded}

    def retire(self, version: int) -> dict[str, Any]:
        """Remove all versions, of which the engine has the one that it serves, and wait for their memory."""
        for directory in Path(self._room.name).iterdir():
            shutil.rmtree(directory)
        end = time.monotonic() + UNLOCK_S
        while time.monotonic() < end and shutil.disk_usage(self._room.name).free < sum(self._layout.buckets):
            time.sleep(0.1)
        return {}

    def close(self) -> dict[str, Any]:
        """Remove all versions."""
        return self.retire(0)

    def memory(self) -> dict[str, Any]:
        """Return the most that this process has held on the device: nothing."""
        return {"peak": 0}

    def _write(self, directory: Path, version: int, number: int) -> TensorEntry:
        """Write a tensor to its place and return its entry."""
        name, shape = self._shapes[number]
        bucket, offset = self._places[number]
        data = self._part(version, number, self._itemsize * int(np.prod(shape)))
        file = os.open(directory / bucket_name(bucket), os.O_WRONLY)
        try:
            written = 0
            while written < len(data):  # one call writes 2 GiB at most
                written += os.pwrite(file, data[written:].data, offset + written)
        finally:
            os.close(file)
        return TensorEntry(name, self._dtype, tuple(shape), bucket, offset, len(data), digest(data.data))

    def _part(self, version: int, number: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a tensor's bytes: a part of the pool, or the pool again and again."""
        first = self._itemsize * ((number + version * len(self._places)) * STRIDE % POOL)
        if first + nbytes <= len(self._pool):
            return self._pool[first : first + nbytes]
        turned = [self._pool[first:], *[self._pool] * (nbytes // len(self._pool) + 1)]
        return np.concatenate(turned)[:nbytes]
