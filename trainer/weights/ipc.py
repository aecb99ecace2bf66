"""Lets engines on the same host copy a version out of the trainer's GPU memory by CUDA IPC handle: `location`
is "HOST:PORT".

    receiver -> sender   {"version": v, "epoch": e, "layout": d}                                       `serving.py`
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}  a handle where `n` is new on this connection
    receiver -> sender   {"done": v}                                                      it has copied all of it

Nobody computes or waits on the trainer's side, and an engine that dies while it copies is a connection that
ends. Versions are written to two sets of buckets in turns, and never over one that an engine still copies.
"""

import base64
import itertools
from typing import Any

import torch

from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.double_buffer import DoubleBuffer
from trainer.weights.version_server import ReceiverConnection, ServedVersion, VersionServer


class IpcSender:
    """Keeps the current version and the one before it on the trainer's GPU."""

    def __init__(self, config: WeightConfig) -> None:
        """Start to listen on a free port of `config.host`.

        Raises:
            SettingsError: if there is no GPU.
            WeightError: if the address cannot be listened on.
        """
        if not torch.cuda.is_available():
            raise SettingsError(
                "weights.transport 'ipc' hands over GPU memory, and there is no GPU here; use shm"
            )
        self._config = config
        self._sets = DoubleBuffer(torch.device("cuda", torch.cuda.current_device()))
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._server = VersionServer(config, lambda: _Handles(gpu))

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        memory: list[torch.Tensor] = []
        try:
            turn = self._sets.take(self._config.timeout_s)

            def allocate(index: int, nbytes: int) -> torch.Tensor:
                memory.append(turn.bucket(index, nbytes))
                return memory[-1]

            layout = fill_buckets(tensors, self._config.bucket_mb << 20, allocate)
        except (WeightError, torch.OutOfMemoryError) as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        manifest = make_manifest(
            "ipc", self._server.address, epoch, version, layout, base_model=base_model, tied=tied
        )
        self._server.current = ServedVersion(manifest, tuple(memory), turn.reading)
        self._sets.published()
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        """Nothing to do: the memory is used again by the version after the next."""

    def close(self) -> None:
        """Stop listening and hang up on every receiver."""
        self._server.close()


class _Handles:
    """What one connection has been told of the trainer's memory."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._numbers = itertools.count()
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        """Address -> number on the wire, and the bucket: while it is here its address is nobody else's."""

    def send(self, line: ReceiverConnection, published: ServedVersion, end: float) -> None:
        line.answer({"gpu": self._gpu, "buckets": [self._name(bucket) for bucket in published.buckets]}, end)
        line.done(published.manifest.version, end)

    def close(self) -> None:
        self._known.clear()

    def _name(self, bucket: torch.Tensor) -> dict[str, Any]:
        known = self._known.get(bucket.data_ptr())
        if known is not None:
            return {"memory": known[0]}
        number = next(self._numbers)
        self._known[bucket.data_ptr()] = (number, bucket)
        # (device, handle, bytes, offset, reference counter, its offset, event, whether to wait for it)
        shared = bucket.untyped_storage()._share_cuda_()
        handle = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]
        return {"memory": number, "handle": handle}
