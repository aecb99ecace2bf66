"""Sends versions through process groups of two, one for each receiver and update: `location` is "HOST:PORT/BACKEND".

    receiver -> sender   {"version": v, "epoch": e}            one line of JSON over TCP
    sender -> receiver   {"store_port": p} or {"error": text}  one line
    both                 TCPStore(HOST, p), group of rank 0 (sender) and rank 1, the buckets broadcast by rank 0 in order
    receiver             closes the connection when it has them all

Pairwise groups: a receiver that hangs or dies holds up no other, and the default process group is not touched.
"""

import json
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.layout import Named, exhaust, fill_buckets, make_manifest

log = logging.getLogger("tether.weights")

MAX_RECEIVERS = 8
"""Served at a time; further ones wait in the listener's backlog, within their own deadlines."""
MAX_LINE = 4096
"""Bytes of a request."""


@dataclass(frozen=True, slots=True)
class _Published:
    """A version in host memory. Whoever sends it holds it, so it stays while it is sent, however many versions follow."""

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...]


class NcclSender:
    """Keeps a copy of the current version on the host and serves it to whoever asks, from its own threads."""

    def __init__(self, config: WeightConfig) -> None:
        """Start to listen on a free port of `config.host`.

        Raises:
            SettingsError: if the process group backend is not known.
            WeightError: if the address cannot be listened on.
        """
        if config.backend not in ("gloo", "nccl"):
            raise SettingsError(f"weights.backend {config.backend!r}: use gloo (CPU) or nccl (GPU)")
        self._config = config
        self._device = torch.device("cuda", torch.cuda.current_device()) if config.backend == "nccl" else torch.device("cpu")
        self._current: _Published | None = None
        self._closed = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_RECEIVERS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        try:
            self._listener = socket.create_server((config.host, 0))
        except OSError as error:
            raise WeightError(f"weights.host {config.host}: cannot listen: {error}") from error
        self._thread = threading.Thread(target=self._listen, name="weights.listen", daemon=True)
        self._thread.start()

    @property
    def location(self) -> str:
        """HOST:PORT/BACKEND, for the manifest."""
        return f"{self._config.host}:{self._listener.getsockname()[1]}/{self._config.backend}"

    def publish(
        self, epoch: str, version: int, tensors: Named, *, base_model: str = "", tied: tuple[tuple[str, str], ...] = ()
    ) -> WeightManifest:
        memory: list[torch.Tensor] = []
        try:
            layout = fill_buckets(tensors, self._config.bucket_mb << 20, lambda _, size: self._allocate(memory, size))
        except WeightError:
            exhaust(tensors)
            raise
        manifest = make_manifest("nccl", self.location, epoch, version, layout, base_model=base_model, tied=tied)
        self._current = _Published(manifest, tuple(bucket[:nbytes] for bucket, nbytes in zip(memory, layout[1], strict=True)))
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        """Nothing to do: only the current version is kept, and those that are being sent."""

    def close(self) -> None:
        """Stop listening and hang up on every receiver."""
        self._closed.set()
        self._current = None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=self._config.timeout_s)

    def _allocate(self, memory: list[torch.Tensor], size: int) -> torch.Tensor:
        memory.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
        return memory[-1]

    def _listen(self) -> None:
        while not self._closed.is_set():
            if not self._slots.acquire(timeout=1.0):
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._slots.release()
                if self._closed.wait(0.05):  # else out of file descriptors, or a peer that hung up at once
                    return
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weights.send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Send the current version to one receiver; whatever goes wrong ends this receiver's update and nothing else."""
        try:
            end = time.monotonic() + self._config.timeout_s
            published = self._requested(connection, end)
            if published is not None:
                self._send(connection, published, end)
        except (OSError, RuntimeError, ValueError) as error:
            if not self._closed.is_set():
                log.warning("weights.send_failed error=%s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            self._slots.release()

    def _requested(self, connection: socket.socket, end: float) -> _Published | None:
        """Read the request; answer it with an error, and return None, if it is not for the current version."""
        line = b""
        while not line.endswith(b"\n"):
            connection.settimeout(_left(end))
            part = connection.recv(MAX_LINE)
            line += part
            if not part or len(line) > MAX_LINE:
                raise ValueError("a receiver hung up, or does not speak our protocol")
        request = json.loads(line)
        wanted = (request.get("epoch"), request.get("version")) if isinstance(request, dict) else None
        published = self._current
        if published is None:
            refusal = "no version is published"
        elif wanted != (published.manifest.epoch, published.manifest.version):
            refusal = f"the current version is {published.manifest.version} of epoch {published.manifest.epoch}"
        else:
            return published
        _answer(connection, {"error": refusal})
        return None

    def _send(self, connection: socket.socket, published: _Published, end: float) -> None:
        # The store's socket is made here because the store's own would listen on every address.
        listener = socket.create_server((self._config.host, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=_left(end))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._config.host, port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        _answer(connection, {"store_port": port})
        group = self._join(store, end)
        # A collective on a GPU is only queued by `wait`; aborting the communicator is what ends one that is stuck.
        watchdog = threading.Timer(_left(end), _abort, args=(group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            for bucket in published.buckets:
                self._broadcast(group, bucket, end)
            connection.settimeout(_left(end))
            connection.recv(1)  # until the receiver has hung up, the group has to stay
        finally:
            watchdog.cancel()
            _abort(group)

    def _join(self, store: Any, end: float) -> Any:
        timeout = timedelta(seconds=_left(end))
        if self._config.backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, 2, timeout)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, 0, 2, options)

    def _broadcast(self, group: Any, bucket: torch.Tensor, end: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=_left(end))
        group.broadcast([bucket.to(self._device)], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        _left(end)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return left


def _abort(group: Any) -> None:
    with suppress(RuntimeError, AttributeError):
        group.abort()
