"""Serves the current version to engines over TCP, for the transports nccl and ipc.

    both                 with keys of the bus: key proofs of both ends (`protocol/host/key_proof.py`)
    receiver -> sender   {"version": v, "epoch": e, "layout": d}   one line of JSON. "slices": n announces n
                         bytes that list the requested slices, if these have changed. "keeps": true: the
                         receiver still has its last confirmed version
    sender -> receiver   {"error": text}, or the transport's answer
    ...                  the transport transfers the bytes
    receiver -> sender   {"done": v}                               the connection is kept for the next version

Each connection has a thread of its own, so a receiver that hangs or dies does not delay other receivers.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from protocol.errors import WeightError
from protocol.host.key_proof import SenderKeys
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from trainer.config import WeightConfig
from trainer.weights.served.receiver_connection import ReceiverConnection, remaining_s
from trainer.weights.served.streamed_buckets import StreamedBuckets

log = logging.getLogger("tether.weights")

MAX_RECEIVERS = 8
"""Maximum number of receivers served at the same time; other receivers wait, within their own deadlines."""
MAX_CONNECTIONS = 1024
"""Maximum number of connections, one per engine rank; further connections are closed."""
POLL_S = 1.0
"""Interval at which an idle connection checks whether the server is closed, seconds."""
ACCEPT_RETRY_S = 0.05
"""Pause after a failed accept, for example without free file descriptors, seconds."""
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # detects a lost host within a minute
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
ADMIT_S = 10.0
"""Timeout for a receiver's key proof, seconds."""
CLOSE_S = 5.0
"""Timeout for the threads of all connections on `close`, seconds."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version in memory. A sending channel references the version, so it lives until it is sent."""

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...] = ()
    """Complete buckets, uint8, each at least of its size in the manifest; only with shared memory."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context entered while the version is sent; raises ValueError if the version has been replaced."""
    streamed: StreamedBuckets = field(default_factory=StreamedBuckets)
    """This rank's pieces, during and after the export."""
    collected: StreamedBuckets = field(default_factory=StreamedBuckets)
    """On rank 0: sums of each part, concatenated by piece."""
    base: "ServedVersion | None" = None
    """Complete previous version, for sending changes; it has no base itself."""


class SenderChannel(Protocol):
    """Channel that transfers the bytes of versions over one connection, for the connection's lifetime."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        """Answer the request, transfer the version, and return when the receiver has confirmed it.

        Raises:
            OSError, RuntimeError, ValueError, WeightError: the receiver has not confirmed the version by
                `end`.
        """

    def close(self) -> None:
        """Release the channel's resources."""


class VersionServer:
    """Server of the current version, on a free port of `config.host`.

    It also serves the provisional version, which is still being exported, to receivers that know it.
    """

    def __init__(
        self, config: WeightConfig, make_channel: Callable[[], SenderChannel], keys: SenderKeys | None = None
    ) -> None:
        """Start to listen.

        Args:
            make_channel: called for each connection.
            keys: keys of the bus; receivers without an authorized key are refused. None: serve all receivers.

        Raises:
            WeightError: the server cannot listen on the address.
        """
        self._config = config
        self._keys = keys
        self._make_channel = make_channel
        self.current: ServedVersion | None = None
        self.provisional: ServedVersion | None = None
        """Version that is being exported, with a provisional manifest."""
        self._closed = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_RECEIVERS)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        try:
            self._listener = socket.create_server((config.host, 0))
        except OSError as error:
            raise WeightError(f"weights.host {config.host}: cannot listen: {error}") from error
        self._thread = threading.Thread(target=self._listen, name="weights.listen", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self._config.host}:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Stop listening and disconnect every receiver."""
        self._closed.set()
        self.current = self.provisional = None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        with self._lock:
            threads = list(self._connections.values())
            for connection in self._connections:
                ReceiverConnection(connection).shut_down()
        # A thread that returns from a library after interpreter shutdown would crash the process.
        end = time.monotonic() + CLOSE_S
        for thread in [self._thread, *threads]:
            thread.join(timeout=max(0.0, end - time.monotonic()))

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(ACCEPT_RETRY_S):
                    return
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="weights.send", daemon=True
            )
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS
                if not full:
                    self._connections[connection] = thread
                    thread.start()
            if full:
                log.warning("weights.too_many_receivers limit=%d", MAX_CONNECTIONS)
                connection.close()

    def _serve(self, accepted: socket.socket) -> None:
        """Serve one receiver until it disconnects; an error only closes its connection."""
        connection, channel = ReceiverConnection(accepted), self._make_channel()
        for level, option, value in SOCKET_OPTIONS:
            accepted.setsockopt(level, option, value)
        served = 0
        try:
            if self._keys is not None and not connection.admit(self._keys, time.monotonic() + ADMIT_S):
                return
            # A receiver may be silent between versions, but a new receiver must send a request.
            first = time.monotonic() + self._config.timeout_s
            while not self._closed.is_set():
                if not connection.readable(POLL_S):
                    if not served:
                        remaining_s(first)
                    continue
                end = time.monotonic() + self._config.timeout_s
                request = connection.request(end)
                if request is None:
                    return
                connection.keeps = request.get("keeps") is True
                served += self._answer(connection, channel, request, end)
        except (OSError, RuntimeError, ValueError, WeightError) as error:
            if not self._closed.is_set():
                # As text, because the record's traceback would keep the channel alive.
                log.warning("weights.send_failed error=%s", str(error))
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(accepted, None)
            accepted.close()

    def _requested(self, request: dict[str, Any]) -> ServedVersion | str:
        """Return the requested version, or why it is not served."""
        # Read in this order: a provisional version that has just become current is found as current.
        provisional, current = self.provisional, self.current
        wanted = (request.get("epoch"), request.get("version"))
        for found in (current, provisional):
            if found is not None and (found.manifest.epoch, found.manifest.version) == wanted:
                layout = layout_digest(found.manifest)
                # gloo kills a receiver process that gets more bytes than its buffer holds
                if request.get("layout", layout) != layout:
                    return f"version {found.manifest.version} has another layout than the request expects"
                return found
        if current is None:
            return "no version is published"
        return f"the current version is {current.manifest.version} of epoch {current.manifest.epoch}"

    def _answer(
        self, connection: ReceiverConnection, channel: SenderChannel, request: dict[str, Any], end: float
    ) -> int:
        """Serve one request; return the number of versions sent, 0 or 1."""
        served = self._requested(request)
        if isinstance(served, str):
            connection.answer({"error": served}, end)
            return 0
        if not self._slots.acquire(timeout=remaining_s(end)):
            raise TimeoutError("no slot became free within weights.timeout_s")
        try:
            with served.reading():
                try:
                    channel.send(connection, served, end)
                except BaseException:
                    # Disconnect before the memory may be overwritten, so a reading receiver notices.
                    connection.shut_down()
                    raise
        finally:
            self._slots.release()
        return 1
