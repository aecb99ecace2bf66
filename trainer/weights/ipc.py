"""Lets engines on the same host copy a version out of the trainer's GPU memory by CUDA IPC handles.

`location` is "HOST:PORT". The dialogue, on the connection of `version_server.py`:

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}
                             a handle where `n` is new on this connection
    receiver -> sender   {"done": v}
                             it has copied everything

The trainer neither computes nor waits, and an engine that dies while it copies is merely a closed connection.
Versions are double-buffered: none is written over one that an engine still copies.
"""

import itertools
from typing import Any

import torch

from protocol.device.bucket_handles import GpuBuckets, SharedBuckets
from protocol.errors import SettingsError, WeightError
from protocol.host.key_proof import SenderKeys
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.double_buffer import DoubleBuffer
from trainer.weights.receiver_connection import ReceiverConnection
from trainer.weights.version_server import ServedVersion, VersionServer


class IpcSender:
    """Keeps the current version and the one before it on the trainer's GPU."""

    def __init__(self, config: WeightConfig, keys: SenderKeys | None = None) -> None:
        """Start to listen on a free port of `config.host`; for `keys` see `VersionServer`.

        Raises:
            SettingsError: there is no GPU.
            WeightError: the address cannot be listened on.
        """
        if not torch.cuda.is_available():
            raise SettingsError(
                "weights.transport 'ipc' shares GPU memory, and there is no GPU here; use shm"
            )
        self._config = config
        memory = GpuBuckets(torch.device("cuda", torch.cuda.current_device()))
        self._memory = DoubleBuffer(memory.empty)
        self._server = VersionServer(config, lambda: HandleChannel(memory), keys)

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        buckets: list[torch.Tensor] = []
        try:
            lease = self._memory.take(self._config.timeout_s)

            def allocate(index: int, nbytes: int) -> torch.Tensor:
                buckets.append(lease.bucket(index, nbytes))
                return buckets[-1]

            contents = fill_buckets(tensors, self._config.bucket_mb << 20, allocate)
        except (WeightError, torch.OutOfMemoryError) as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        manifest = make_manifest(
            "ipc", self._server.address, epoch, version, contents, base_model=base_model, tied=tied
        )
        self._server.current = ServedVersion(manifest, tuple(buckets), lease.reading)
        self._memory.published()
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        """Do nothing: the version after the next one reuses the memory."""

    def close(self) -> None:
        """Stop listening and disconnect every receiver."""
        self._server.close()


class HandleChannel:
    """Sends handles of buckets to one receiver, each only once."""

    def __init__(self, memory: SharedBuckets) -> None:
        """Send handles of buckets of this memory."""
        self._memory = memory
        self._numbers = itertools.count()
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        """Address -> (number on the wire, bucket). The reference keeps the address from being reused."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        connection.answer(self.described(served), end)
        connection.wait_done(served.manifest.version, end)

    def close(self) -> None:
        self._sent.clear()

    def described(self, served: ServedVersion) -> dict[str, Any]:
        """Return the answer that describes the buckets of a version."""
        return {"gpu": self._memory.place, "buckets": [self._bucket(bucket) for bucket in served.buckets]}

    def _bucket(self, bucket: torch.Tensor) -> dict[str, Any]:
        sent = self._sent.get(bucket.data_ptr())
        if sent is not None:
            return {"memory": sent[0]}
        number = next(self._numbers)
        self._sent[bucket.data_ptr()] = (number, bucket)
        return {"memory": number, "handle": self._memory.handle(bucket)}
