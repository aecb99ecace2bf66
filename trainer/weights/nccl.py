"""Sends versions through process groups of two, one for each engine rank: `location` is "HOST:PORT/BACKEND".

    receiver -> sender   {"version": v, "epoch": e, "layout": d}            `serving.py`
    sender -> receiver   {"store_port": p}                     on the first request: both make a TCPStore(HOST, p) and a group of rank 0
                                                               (sender) and rank 1 of it, which stay for the
                                                               next versions
                         {"ready": true}                       on later ones
    both                 a byte, broadcast by rank 0 when the group is new: only then a GPU's is complete
    both                 the pieces of the buckets (`protocol.weights.buckets.chunks`), broadcast by rank 0 in order
    receiver -> sender   {"done": v}

Pairwise groups: a receiver that hangs or dies holds up no other, and no default process group is touched. The
version lies in memory of its own on the trainer's device, so the next training step does not wait for its
transfers. A version that is laid out as the one before it is sent while it is made (`draft`), a bucket as
soon as it is full.
"""

import socket
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from protocol.device.bounded_init import check_stuck, init_with_deadline
from protocol.device.pair_group import ALONE, SENDER, abort, make_pair
from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightDraft, WeightManifest
from protocol.weights.buckets import chunks
from protocol.weights.provisional import provisional_manifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.streamed_buckets import StreamedBuckets
from trainer.weights.version_server import (
    CLOSE_S,
    ReceiverConnection,
    ServedVersion,
    VersionServer,
    remaining_s,
)

BACKENDS = ("gloo", "nccl")
JOIN_POLL_S = 0.005
"""Between two looks whether a receiver has joined."""
FILL_POLL_S = 0.05
"""Between two looks whether a receiver still waits for a bucket that is not full."""
POLL_S = 0.0005
"""Between two looks whether the transfer is through: the host does not wait in the driver, which no deadline
reaches."""


class NcclSender:
    """Keeps a copy of the current version and serves it to whoever asks, from its own threads."""

    def __init__(self, config: WeightConfig) -> None:
        """Start to listen on a free port of `config.host`.

        Raises:
            SettingsError: if the process group backend is not known, or cannot be used here.
            WeightError: if the address cannot be listened on.
        """
        backend = config.backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if backend not in BACKENDS:
            raise SettingsError(f"weights.backend {backend!r}: use gloo (CPU) or nccl (GPU)")
        if backend == "nccl" and not torch.cuda.is_available():
            raise SettingsError("weights.backend 'nccl': there is no GPU here; use gloo")
        self._config = config
        self._backend = backend
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        self._server = VersionServer(config, lambda: _Pair(config.host, backend, self._device))

    @property
    def location(self) -> str:
        """HOST:PORT/BACKEND, for the manifest."""
        return f"{self._server.address}/{self._backend}"

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """See `DraftingSender`."""
        before = self._server.current
        if before is None or before.manifest.epoch != epoch:
            return None
        self._give_up()
        self._server.coming = ServedVersion(
            provisional_manifest(before.manifest, version), filling=StreamedBuckets()
        )
        return WeightDraft(epoch=epoch, version=version, like=before.manifest.version)

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
        filling = self._filling(epoch, version)

        def allocate(_: int, size: int) -> torch.Tensor:
            if memory:
                filling.add(memory[-1])
            memory.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            return memory[-1]

        try:
            check_stuck()
            layout = fill_buckets(tensors, self._config.bucket_mb << 20, allocate)
            filling.add(memory[-1])
            filling.fail()  # who waits for more has asked for another layout
        except (WeightError, torch.OutOfMemoryError) as error:
            self._give_up()
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        except BaseException:
            self._give_up()
            raise
        manifest = make_manifest(
            "nccl", self.location, epoch, version, layout, base_model=base_model, tied=tied
        )
        self._server.current = ServedVersion(manifest, filling=filling)
        self._server.coming = None
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        """Nothing to do: only the current version is kept, and those that are being sent."""

    def close(self) -> None:
        """Stop listening and hang up on every receiver."""
        self._give_up()
        self._server.close()

    def _filling(self, epoch: str, version: int) -> StreamedBuckets:
        """Where the buckets of a version go: to the senders of its draft, if it has one."""
        coming = self._server.coming
        if coming is not None and (coming.manifest.epoch, coming.manifest.version) == (epoch, version):
            return coming.filling
        self._give_up()
        return StreamedBuckets()

    def _give_up(self) -> None:
        """Whoever receives a draft is hung up on."""
        coming, self._server.coming = self._server.coming, None
        if coming is not None:
            coming.filling.fail()


class _Pair:
    """Rank 0 of a group of two."""

    def __init__(self, host: str, backend: str, device: torch.device) -> None:
        self._host = host
        self._backend = backend
        self._device = device
        self._group: Any = None

    def send(self, line: ReceiverConnection, published: ServedVersion, end: float) -> None:
        if self._group is None:
            self._group = self._join(line, end)
        else:
            line.answer({"ready": True}, end)
        # What is stuck in a library or on the GPU is ended by aborting the communicator.
        watchdog = threading.Timer(remaining_s(end), abort, args=(self._group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            if self._device.type == "cuda":
                self._send_on_stream(line, published, end)
            else:
                self._broadcast(line, published, end)
            line.done(published.manifest.version, end)
        except BaseException:
            self.close()
            raise
        finally:
            watchdog.cancel()
            watchdog.join(
                CLOSE_S
            )  # a group that it let go of last would end while the interpreter does, and take the process with it

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)

    def _join(self, line: ReceiverConnection, end: float) -> Any:
        # The store's socket is made here because the store's own would listen on every address.
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=remaining_s(end))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        line.answer({"store_port": port}, end)
        # Making a group whose other side does not come leaves a thread behind, so it is not begun before the
        # receiver is there.
        while not store.check(["receiver"]):
            if line.hung_up(JOIN_POLL_S):
                raise ValueError("a receiver left before it had joined")
            remaining_s(end)
        seconds = remaining_s(end)
        return init_with_deadline(
            partial(make_pair, store, SENDER, self._device, seconds), abort, seconds, lambda: line.hung_up(0)
        )

    def _broadcast(self, line: ReceiverConnection, published: ServedVersion, end: float) -> None:
        for piece in chunks(published.manifest, ALONE[self._backend]):
            bucket = _bucket(line, published, piece.bucket, end)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=remaining_s(end))
            self._group.broadcast([bucket[piece.start : piece.end]], options).wait()

    def _send_on_stream(self, line: ReceiverConnection, published: ServedVersion, end: float) -> None:
        """Queue all pieces and wait until they are through, the receiver is gone, or the time is up."""
        stream = torch.cuda.Stream(self._device)  # not the one that trains
        with torch.cuda.stream(stream):
            self._broadcast(line, published, end)
            through = torch.cuda.Event()
            through.record(stream)
        while not through.query():
            if line.hung_up(POLL_S):
                raise ValueError("a receiver died in the middle of a version")
            remaining_s(end)


def _bucket(line: ReceiverConnection, published: ServedVersion, index: int, end: float) -> torch.Tensor:
    """A bucket of the version, when it is full. Raises ValueError: the receiver has left, or the bucket will
    not come."""
    while (bucket := published.filling.bucket(index, min(FILL_POLL_S, remaining_s(end)))) is None:
        if line.hung_up(0):
            raise ValueError("a receiver left before the version was made")
    if len(bucket) < published.manifest.buckets[index]:
        raise ValueError("the version is laid out in another way than the one before it")
    return bucket
