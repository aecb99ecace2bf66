"""Sends versions through process groups of two ranks, one group per engine rank.

`location` is "HOST:PORT/BACKEND". The dialogue, on the connection of `version_server.py`:

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"join": true}      first request: both create a group, rank 0 the sender, which is
    receiver -> sender   {"joining": true}   kept for the next versions; they find each other by the lines of
                                             `protocol/device/pair_store.py`
                         {"ready": true}     later requests
    both                 a byte, broadcast by rank 0 in a new group, which completes a GPU's communicator
    both                 the chunks of the buckets (`protocol.weights.buckets.chunks`), broadcast by rank 0
    receiver -> sender   {"done": v}

With a group per receiver, one that hangs or dies delays no other, and the default process group is not
touched. The version is kept in memory of its own on the trainer's device, so the next training step does not
wait for transfers. A version with the layout of the one before it is sent while it is exported
(`provisional`), each bucket as soon as it is full.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.device.bounded_init import check_stuck
from protocol.device.pair_group import ALONE, BACKENDS, SENDER, abort
from protocol.device.pair_store import join_pair
from protocol.errors import SettingsError, WeightError
from protocol.host.key_proof import SenderKeys
from protocol.messages import WeightDraft, WeightManifest
from protocol.weights.buckets import chunks
from protocol.weights.provisional import provisional_manifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.receiver_connection import ConnectionLine, ReceiverConnection, remaining_s
from trainer.weights.streamed_buckets import StreamedBuckets
from trainer.weights.version_server import CLOSE_S, ServedVersion, VersionServer

BUCKET_POLL_S = 0.05
"""Interval at which the connection is checked while a receiver waits for a bucket."""
POLL_S = 0.0005
"""Interval at which a transfer on a GPU is polled: a wait in the driver would have no deadline."""


class NcclSender:
    """Keeps a copy of the current version and serves it to whoever asks, from its own threads."""

    def __init__(self, config: WeightConfig, keys: SenderKeys | None = None) -> None:
        """Start to listen on a free port of `config.host`; for `keys` see `VersionServer`.

        Raises:
            SettingsError: the process group backend is unknown, or cannot be used here.
            WeightError: the address cannot be listened on.
        """
        self._config = config
        self._backend, self._device = backend_of(config)
        self._server = VersionServer(config, lambda: PairSenderChannel(self._backend, self._device), keys)

    @property
    def location(self) -> str:
        """HOST:PORT/BACKEND, for the manifest."""
        return f"{self._server.address}/{self._backend}"

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Accept requests for a version that the next `publish` will export; see `StreamingSender`."""
        before = self._server.current
        if before is None or before.manifest.epoch != epoch:
            return None
        self._cancel_provisional()
        self._server.provisional = ServedVersion(
            provisional_manifest(before.manifest, version), streamed=StreamedBuckets()
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
        buckets: list[torch.Tensor] = []
        streamed = self._streamed_buckets(epoch, version)

        def allocate(_: int, size: int) -> torch.Tensor:
            if buckets:
                streamed.add(buckets[-1])
            buckets.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            return buckets[-1]

        try:
            check_stuck()
            contents = fill_buckets(tensors, self._config.bucket_mb << 20, allocate)
            streamed.add(buckets[-1])
            streamed.fail()  # a receiver that waits for another bucket expects another layout
        except (WeightError, torch.OutOfMemoryError) as error:
            self._cancel_provisional()
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        except BaseException:
            self._cancel_provisional()
            raise
        manifest = make_manifest(
            "nccl", self.location, epoch, version, contents, base_model=base_model, tied=tied
        )
        self._server.current = ServedVersion(manifest, streamed=streamed)
        self._server.provisional = None
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        """Do nothing: only the current version is kept, and those that are being sent."""

    def close(self) -> None:
        """Stop listening and disconnect every receiver."""
        self._cancel_provisional()
        self._server.close()

    def _streamed_buckets(self, epoch: str, version: int) -> StreamedBuckets:
        """Return where the buckets of a version go: those of the provisional version, if it is this one."""
        provisional = self._server.provisional
        if provisional is not None:
            manifest = provisional.manifest
            if (manifest.epoch, manifest.version) == (epoch, version):
                return provisional.streamed
        self._cancel_provisional()
        return StreamedBuckets()

    def _cancel_provisional(self) -> None:
        """Disconnect the receivers of the provisional version, if there is one."""
        provisional, self._server.provisional = self._server.provisional, None
        if provisional is not None:
            provisional.streamed.fail()


def backend_of(config: WeightConfig) -> tuple[str, torch.device]:
    """Return the backend of the process groups, and where the versions lie that they send.

    Raises:
        SettingsError: the backend is unknown, or cannot be used here.
    """
    backend = config.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in BACKENDS:
        raise SettingsError(f"weights.backend {backend!r}: use gloo (CPU) or nccl (GPU)")
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("weights.backend 'nccl': there is no GPU here; use gloo")
    return backend, torch.device("cuda", torch.cuda.current_device())


class PairSenderChannel:
    """Sends chunks to one receiver, as rank 0 of a group of two."""

    def __init__(self, backend: str, device: torch.device, facts: dict[str, Any] | None = None) -> None:
        """Send from `device`; `facts` go into every answer."""
        self._backend = backend
        self._device = device
        self._facts = facts or {}
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        """Stream of all versions: torch keeps freed memory for the stream on which it was allocated."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        if self._group is None:
            self._group = self._join(connection, end)
        else:
            connection.answer({"ready": True, **self._facts}, end)
        # Aborting the group ends what blocks in a library or on the GPU.
        watchdog = threading.Timer(remaining_s(end), abort, args=(self._group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            if self._device.type == "cuda":
                self._send_on_stream(connection, served, end)
            else:
                self._broadcast(connection, served, end)
            connection.wait_done(served.manifest.version, end)
        except BaseException:
            self.close()
            raise
        finally:
            watchdog.cancel()
            # If the timer's thread dropped the last reference to the group while the interpreter shuts down,
            # the process would crash.
            watchdog.join(CLOSE_S)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)

    def _join(self, connection: ReceiverConnection, end: float) -> Any:
        connection.answer({"join": True, **self._facts}, end)
        # The group is not created before the receiver is there: if it never came, a thread would be stuck.
        if connection.request(end) != {"joining": True}:
            raise ValueError("a receiver disconnected before it had joined the group")
        return join_pair(ConnectionLine(connection, end), SENDER, self._device, remaining_s(end))

    def _broadcast(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        for chunk in chunks(served.manifest, ALONE[self._backend]):
            bucket = full_bucket(connection, served.streamed, chunk.bucket, end)
            if len(bucket) < served.manifest.buckets[chunk.bucket]:
                raise ValueError("the version does not have the layout of the one before it")
            self._send_bytes(bucket[chunk.start : chunk.end], end)

    def _send_bytes(self, memory: torch.Tensor, end: float) -> None:
        """Send uint8 [n]; on a GPU it is queued on the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=remaining_s(end))
        self._group.broadcast([memory], options).wait()

    def _send_on_stream(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        """Queue all chunks and wait until they are sent, the receiver disconnects, or time is up."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # not the stream that trains
        with torch.cuda.stream(self._stream):
            self._broadcast(connection, served, end)
            sent = torch.cuda.Event()
            sent.record()
        while not sent.query():
            if connection.disconnected(POLL_S):
                raise ValueError("a receiver disconnected in the middle of a version")
            remaining_s(end)


def full_bucket(
    connection: ReceiverConnection, streamed: StreamedBuckets, index: int, end: float
) -> torch.Tensor:
    """Wait for a bucket of the version to be full.

    Raises:
        ValueError: the receiver has disconnected, or the bucket will not come.
    """
    while (bucket := streamed.bucket(index, min(BUCKET_POLL_S, remaining_s(end)))) is None:
        if connection.disconnected(0):
            raise ValueError("a receiver disconnected before the version was exported")
    return bucket
