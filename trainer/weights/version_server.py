"""Serves the current version to engines that request it over TCP; shared by the transports nccl and ipc.

    receiver -> sender   {"version": v, "epoch": e, "layout": d}   one line of JSON; with "slices": n where
                         parts of it are wanted, and n bytes behind it that say which, if they have changed
    sender -> receiver   {"error": text}, or the transport's answer
    ...                  the transport moves the bytes
    receiver -> sender   {"done": v}                               the connection is kept for the next version

Each connection has a thread of its own, so that a receiver that hangs or dies delays no other.
"""

import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from protocol.weights.slices import MAX_WANTED_BYTES
from trainer.config import WeightConfig
from trainer.weights.streamed_buckets import StreamedBuckets

log = logging.getLogger("tether.weights")

MAX_RECEIVERS = 8
"""Receivers served at a time; others wait, within their own deadlines."""
MAX_CONNECTIONS = 1024
"""Connections, one per engine rank; further ones are closed."""
MAX_LINE = 4096
"""Bytes of a request."""
POLL_S = 1.0
"""Interval at which an idle connection checks whether the server is closed."""
ACCEPT_RETRY_S = 0.05
"""Pause after a failed accept, for instance without free file descriptors."""
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a host that vanished is noticed within a minute
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
CLOSE_S = 5.0
"""Time for the threads of all connections to end on `close`."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version in memory. A channel that sends it references it, so it lives until it is sent."""

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...] = ()
    """Complete buckets, uint8, each of at least its size in the manifest; of a transport that shares
    memory."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the version is sent; raises ValueError if it has been replaced."""
    streamed: StreamedBuckets = field(default_factory=StreamedBuckets)
    """The buckets, during the export and after it; of a transport that sends them. Pieces, with parts."""
    collected: StreamedBuckets = field(default_factory=StreamedBuckets)
    """With parts, on rank 0: the sums of every piece of every part, one after the other."""


class ReceiverConnection:
    """A receiver's connection, which carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        """Bytes after the last line: a receiver may send the next request right behind {"done": v}."""
        self.wanted = b""
        """The slices that the receiver asked for last, see `protocol.weights.slices.encode_wanted`."""

    def request(self, end: float) -> dict[str, Any] | None:
        """Read the next line; None if the receiver disconnected before it began one.

        Raises:
            TimeoutError: it is not complete by `end`.
            ValueError: it is not a line of JSON.
        """
        while b"\n" not in self._rest:
            self.connection.settimeout(remaining_s(end))
            part = self.connection.recv(MAX_LINE)
            self._rest += part
            if not self._rest:
                return None
            if not part or len(self._rest) > MAX_LINE:
                raise ValueError("a receiver disconnected within a request, or sent no line of JSON")
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict):
            return {}
        if "slices" in found:
            self.wanted = self._raw(found["slices"], end)
        return found

    def _raw(self, nbytes: object, end: float) -> bytes:
        """Read the bytes that follow a line. Raises as `request`."""
        if not isinstance(nbytes, int) or not 0 <= nbytes <= MAX_WANTED_BYTES:
            raise ValueError(f"a receiver announced {nbytes} bytes of slices")
        while len(self._rest) < nbytes:
            self.connection.settimeout(remaining_s(end))
            part = self.connection.recv(min(nbytes - len(self._rest), 1 << 16))
            if not part:
                raise ValueError("a receiver disconnected within a request")
            self._rest += part
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return found

    def answer(self, answer: dict[str, Any], end: float) -> None:
        """Send a line of JSON."""
        self.connection.settimeout(remaining_s(end))
        self.connection.sendall(json.dumps(answer).encode() + b"\n")

    def wait_done(self, version: int, end: float) -> None:
        """Wait for the receiver's {"done": version}.

        Raises:
            ValueError: it disconnected, or sent something else.
        """
        if self.request(end) != {"done": version}:
            raise ValueError(f"a receiver disconnected in the middle of version {version}")

    def shut_down(self) -> None:
        """Disconnect at once, which also wakes threads that wait on the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def readable(self, seconds: float) -> bool:
        """Return whether there is something to read, or the receiver disconnects, within `seconds`."""
        if self._rest:
            return True
        ready = select.poll()  # `select` cannot handle descriptors over 1023
        ready.register(self.connection, select.POLLIN)
        return bool(ready.poll(1e3 * seconds))

    def disconnected(self, seconds: float) -> bool:
        """Return whether the receiver disconnects within `seconds`, with nothing left to read."""
        return self.readable(seconds) and not self._rest and not self.connection.recv(1, socket.MSG_PEEK)


class SenderChannel(Protocol):
    """How one connection transfers the bytes of versions; lives as long as the connection."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        """Answer the request, transfer the version, and return when the receiver has it.

        Raises:
            OSError, RuntimeError, ValueError, WeightError: the receiver does not have it by `end`.
        """

    def close(self) -> None:
        """Release what the channel holds."""


class VersionServer:
    """Listens on a free port of `config.host` and serves the current version.

    It also serves the provisional version, which is still being exported, to receivers that know of it.
    """

    def __init__(self, config: WeightConfig, make_channel: Callable[[], SenderChannel]) -> None:
        """Start to listen; `make_channel` is called for each connection.

        Raises:
            WeightError: the address cannot be listened on.
        """
        self._config = config
        self._make_channel = make_channel
        self.current: ServedVersion | None = None
        self.provisional: ServedVersion | None = None
        """A version that is being exported, with a provisional manifest."""
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
        # A thread that returns from a library after the interpreter has shut down would crash the process.
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
        """Serve one receiver until it disconnects; an error closes its connection and has no other effect."""
        connection, channel = ReceiverConnection(accepted), self._make_channel()
        for level, option, value in SOCKET_OPTIONS:
            accepted.setsockopt(level, option, value)
        served = 0
        try:
            # A receiver that has had a version may be silent until the next one; a new one must send a
            # request.
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
                served += self._answer(connection, channel, request, end)
        except (OSError, RuntimeError, ValueError, WeightError) as error:
            if not self._closed.is_set():
                # As text: the traceback of a log record would keep the channel open as long as the record.
                log.warning("weights.send_failed error=%s", str(error))
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(accepted, None)
            accepted.close()

    def _requested(self, request: dict[str, Any]) -> ServedVersion | str:
        """Return the version of a request, or why it is not served."""
        # In this order: a provisional version that has just become the current one is found as that.
        provisional, current = self.provisional, self.current
        wanted = (request.get("epoch"), request.get("version"))
        for found in (current, provisional):
            if found is not None and (found.manifest.epoch, found.manifest.version) == wanted:
                layout = layout_digest(found.manifest)
                # gloo ends the process of a receiver that gets more bytes than it has memory for
                if request.get("layout", layout) != layout:
                    return f"version {found.manifest.version} has another layout than the request expects"
                return found
        if current is None:
            return "no version is published"
        return f"the current version is {current.manifest.version} of epoch {current.manifest.epoch}"

    def _answer(
        self, connection: ReceiverConnection, channel: SenderChannel, request: dict[str, Any], end: float
    ) -> int:
        """Serve one request; return how many versions were sent: 0 if the requested one is not served."""
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
                    # Before the memory may be written again, so that a receiver that still reads it notices.
                    connection.shut_down()
                    raise
        finally:
            self._slots.release()
        return 1


def remaining_s(end: float) -> float:
    """Return the seconds until `end`. Raises TimeoutError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return seconds
