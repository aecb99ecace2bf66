"""Serves the version that is current to engines that ask for it over TCP; what nccl and ipc share.

    receiver -> sender   {"version": v, "epoch": e, "layout": d}     one line of JSON; the connection stays for the next version
    sender -> receiver   {"error": text}, or what the transport answers
    ...                  the transport moves the bytes
    receiver -> sender   {"done": v}

Each connection has a thread of its own, so a receiver that hangs or dies costs nobody else anything.
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
from trainer.config import WeightConfig
from trainer.weights.streamed_buckets import StreamedBuckets

log = logging.getLogger("tether.weights")

MAX_RECEIVERS = 8
"""Served at a time; further ones wait, within their own deadlines."""
MAX_CONNECTIONS = 1024
"""Engine ranks; further ones are hung up on."""
MAX_LINE = 4096
"""Bytes of a request."""
POLL_S = 1.0
"""Between two looks whether an idle connection is to be closed."""
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a host that vanished is noticed within a minute
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
CLOSE_S = 5.0
"""For all connections to end when they are hung up on."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version in memory. Whoever sends it holds it, so it stays while it is sent, however many versions
    follow."""

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...] = ()
    """Of a transport that hands them over: uint8, each of at least its size in the manifest, complete."""
    sending: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered for as long as it is sent; ValueError if that cannot begin any more."""
    filling: StreamedBuckets = field(default_factory=StreamedBuckets)
    """Of a transport that sends them: where they come from, one after the other, while the version is made
    and after."""


class ReceiverConnection:
    """One connection, a line of JSON at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        """What came behind the last line: who says that it has one version may ask for the next at once."""

    def request(self, end: float) -> dict[str, Any] | None:
        """The next line; None if the receiver has hung up before it began one.

        Raises:
            TimeoutError: not complete by `end`.
            ValueError: not a line of JSON.
        """
        while b"\n" not in self._rest:
            self.connection.settimeout(remaining_s(end))
            part = self.connection.recv(MAX_LINE)
            self._rest += part
            if not self._rest:
                return None
            if not part or len(self._rest) > MAX_LINE:
                raise ValueError("a receiver hung up, or does not speak our protocol")
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        return found if isinstance(found, dict) else {}

    def answer(self, answer: dict[str, Any], end: float) -> None:
        """Send a line."""
        self.connection.settimeout(remaining_s(end))
        self.connection.sendall(json.dumps(answer).encode() + b"\n")

    def done(self, version: int, end: float) -> None:
        """Wait until the receiver says that it has the whole version.

        Raises:
            ValueError: it has hung up instead.
        """
        if self.request(end) != {"done": version}:
            raise ValueError(f"a receiver left in the middle of version {version}")

    def hang_up(self) -> None:
        """At once, also for who waits on the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def readable(self, seconds: float) -> bool:
        """Whether there is something to read, or the receiver has hung up, within `seconds`."""
        if self._rest:
            return True
        ready = select.poll()  # `select` knows no descriptors over 1023
        ready.register(self.connection, select.POLLIN)
        return bool(ready.poll(1e3 * seconds))

    def hung_up(self, seconds: float) -> bool:
        """Whether the receiver has hung up, or does within `seconds`, with nothing left to read."""
        return self.readable(seconds) and not self._rest and not self.connection.recv(1, socket.MSG_PEEK)


class Channel(Protocol):
    """How one connection gets its bytes; lives as long as the connection."""

    def send(self, line: ReceiverConnection, published: ServedVersion, end: float) -> None:
        """Answer the request, and return when the receiver has the bytes.

        Raises:
            OSError, RuntimeError, ValueError, WeightError: it has not by `end`.
        """

    def close(self) -> None:
        """Release what the channel holds."""


class VersionServer:
    """Listens on a free port of `config.host` and serves `current`, and `coming` to those who know of it."""

    def __init__(self, config: WeightConfig, channel: Callable[[], Channel]) -> None:
        """`channel` is called for each connection. Raises WeightError if the address cannot be listened
        on."""
        self._config = config
        self._channel = channel
        self.current: ServedVersion | None = None
        self.coming: ServedVersion | None = None
        """A version that is being made; its manifest is a draft."""
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
        """Stop listening and hang up on every receiver."""
        self._closed.set()
        self.current = self.coming = None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        with self._lock:
            threads = list(self._connections.values())
            for connection in self._connections:
                ReceiverConnection(connection).hang_up()
        # A thread that comes back from a library when the interpreter is gone would take the process with it.
        end = time.monotonic() + CLOSE_S
        for thread in [self._thread, *threads]:
            thread.join(timeout=max(0.0, end - time.monotonic()))

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(0.05):  # else out of file descriptors, or a peer that hung up at once
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

    def _serve(self, connection: socket.socket) -> None:
        """Serve one receiver until it hangs up; whatever goes wrong ends this receiver's connection and
        nothing else."""
        line, channel = ReceiverConnection(connection), self._channel()
        for level, option, value in SOCKET_OPTIONS:
            connection.setsockopt(level, option, value)
        served = 0
        try:
            # A connection that has had a version may be silent until there is another; a new one has to ask.
            first = time.monotonic() + self._config.timeout_s
            while not self._closed.is_set():
                if not line.readable(POLL_S):
                    if not served:
                        remaining_s(first)
                    continue
                end = time.monotonic() + self._config.timeout_s
                request = line.request(end)
                if request is None:
                    return
                served += self._answer(line, channel, request, end)
        except (OSError, RuntimeError, ValueError, WeightError) as error:
            if not self._closed.is_set():
                log.warning(
                    "weights.send_failed error=%s", str(error)
                )  # its traceback would keep the channel open as long as the record
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _asked_for(self, request: dict[str, Any]) -> ServedVersion | str:
        """The version of a request, or why it is not served."""
        coming, current = self.coming, self.current  # in this order: what is not coming any more is there
        wanted = (request.get("epoch"), request.get("version"))
        for found in (current, coming):
            if found is not None and (found.manifest.epoch, found.manifest.version) == wanted:
                layout = layout_digest(found.manifest)
                if (
                    request.get("layout", layout) != layout
                ):  # gloo ends the process of a receiver to whom more comes than it has room for
                    return f"version {found.manifest.version} is laid out in another way than is expected"
                return found
        if current is None:
            return "no version is published"
        return f"the current version is {current.manifest.version} of epoch {current.manifest.epoch}"

    def _answer(self, line: ReceiverConnection, channel: Channel, request: dict[str, Any], end: float) -> int:
        """Serve one request. Returns the number of versions sent: 0 if it is not for the current one."""
        published = self._asked_for(request)
        if isinstance(published, str):
            line.answer({"error": published}, end)
            return 0
        if not self._slots.acquire(timeout=remaining_s(end)):
            raise TimeoutError("no slot became free within weights.timeout_s")
        try:
            with published.sending():
                try:
                    channel.send(line, published, end)
                except BaseException:
                    line.hang_up()  # before the memory may be written again: who still reads it will see that
                    raise
        finally:
            self._slots.release()
        return 1


def remaining_s(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("not complete within weights.timeout_s")
    return seconds
