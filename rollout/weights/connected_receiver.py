"""Receives versions over a persistent connection, for the transports nccl and ipc."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from protocol.errors import WeightError
from protocol.host.line_connection import TimedLine
from protocol.messages import WeightManifest
from rollout.weights.channel import ReceiverChannel
from rollout.weights.sender_connection import SenderConnection
from rollout.weights.verification import Deadline

T = TypeVar("T")


class ConnectedReceiver:
    """Client that requests a version, verifies its bytes and confirms it; it disconnects on any error.

    Used by one thread at a time; `close` may be called from another thread.
    """

    def __init__(self, channel: ReceiverChannel) -> None:
        self._channel = channel
        self._location = ""
        self._connection: SenderConnection | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        """Set if `close` was called since the last `transfer` began."""
        self._receiving = False
        self._sender_left = False
        """Whether the sender disconnected in the middle of a version."""

    def transfer(
        self,
        manifest: WeightManifest,
        deadline: Deadline,
        receive: Callable[[dict[str, Any], TimedLine], Iterator[T]],
        wanted: bytes,
        *,
        keeps: bool = False,
    ) -> Iterator[T]:
        """Request a version, yield the items of `receive`, and confirm the version.

        Args:
            receive: receives the bytes, given the sender's answer and the connection; waits for them and may
                refuse them.
            wanted: encoded slices, see `SenderConnection.request`.
            keeps: see `SenderConnection.request`.

        Raises:
            WeightError: the version was not received; the connection is closed.
        """
        self._closed.clear()
        host, port = self._channel.address(manifest)
        complete = False
        # `close` unblocks calls that wait in a library or on the GPU.
        watchdog = threading.Timer(deadline.remaining("starting"), self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._receiving = True
            connection, answer = self._request(host, port, manifest, deadline, wanted, keeps)
            yield from receive(answer, TimedLine(connection, deadline.remaining))
            connection.confirm(manifest, deadline)
            complete = True
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
            deadline.remaining("receiving")
            problem = "the sender disconnected in the middle" if self._sender_left else str(error)
            raise WeightError(f"version {manifest.version} from {manifest.location}: {problem}") from error
        finally:
            watchdog.cancel()
            if not complete:
                self._channel.drain_device()
                self.close()
            self._end_receiving()

    def close(self) -> None:
        """Disconnect, release the transport's resources, and wake a thread that waits for the sender."""
        self._closed.set()
        self._disconnect()

    def disconnected(self) -> bool:
        """Return whether the sender has disconnected or the receiver was closed."""
        connection = self._connection
        return self._closed.is_set() or connection is None or connection.disconnected()

    def _disconnect(self, only: SenderConnection | None = None) -> None:
        """Close the connection and release its resources; with `only`, do so only for this connection."""
        # Hold the lock during the release: after `close` returns in any thread, no byte is written.
        with self._lock:
            connection = self._connection
            if only is not None and connection is not only:
                return
            self._connection = None
            if connection is not None:
                # first, so that a sender that waits for its export notices and stops
                connection.close()
            self._channel.release()

    def _on_hang_up(self, connection: SenderConnection) -> None:
        """Release a disconnected sender's resources immediately, unless a copy is in progress."""
        with self._lock:
            if connection is self._connection and self._receiving:
                self._sender_left = True
                self._channel.interrupt()
            else:
                self._disconnect(connection)

    def _end_receiving(self) -> None:
        with self._lock:
            self._receiving = False
            # `_on_hang_up` leaves connections that end during a copy to this method.
            if self._connection is not None and self._connection.disconnected():
                self._disconnect()

    def _request(
        self,
        host: str,
        port: int,
        manifest: WeightManifest,
        deadline: Deadline,
        wanted: bytes,
        keeps: bool,
    ) -> tuple[SenderConnection, dict[str, Any]]:
        """Request a version on the existing connection, or on a new one if there is none or it is closed."""
        connection = self._connection  # read once: the watching thread may set it to None
        if connection is not None and self._location == manifest.location:
            with suppress(OSError, ValueError):
                return connection, connection.request(manifest, deadline, wanted, keeps=keeps)
        self._disconnect()
        self._sender_left = False
        self._location = manifest.location
        self._connection = connection = SenderConnection(host, port, deadline)
        connection.watch(partial(self._on_hang_up, connection))
        if self._closed.is_set():
            raise ConnectionError("the receiver was closed")
        return connection, connection.request(manifest, deadline, wanted)
