"""Drives one ZeroMQ socket from the event loop.

A socket's descriptor is edge-triggered: it becomes readable when the socket's state may have changed, and any
call on the socket, also a send, may clear it. So after each wake the socket is read until it is empty, each
send is followed by another read (`poke`, once per loop iteration), and a timer reads in case an edge was
missed nevertheless.
"""

import asyncio
from collections.abc import Callable

import zmq

MAX_SOCKETS = 16_384
"""Sockets of one context; each link takes three. ZeroMQ's own limit of 1,023 would allow 340 receivers."""
BATCH = 64
"""Messages taken per wake; then other callbacks of the loop run."""
FALLBACK_S = 0.25
"""Seconds between two reads by the timer."""
KEPT_BYTES = 8 << 20
"""Freed blocks of up to this many bytes stay with the process."""
_ZERO_COPY_RECV = 10
"""ZMQ_ZERO_COPY_RECV of zmq.h, for which pyzmq has no name."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context whose sockets do not linger and copy small messages out of the buffer of the network.

    A connection keeps the setting that its socket had when it was made. If that is changed only as the socket
    is closed, the end of the context may wait for ever.

    By default ZeroMQ hands out the buffer itself: each message that waits or is held then occupies 18 kB,
    even a small one, and memory claimed during one pause of a process with many peers is not returned.

    A block of `KEPT_BYTES` is allocated and freed first, from which glibc learns to keep freed memory: frames
    of 100 KB come and go, and would each be mapped, cleared and returned to the system.
    """
    bytes(KEPT_BYTES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)  # of every socket that is made from now on
    context.set(_ZERO_COPY_RECV, 0)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class Pump:
    """Calls `take` for what arrives, and `writable` after each wake, when a full socket may have room again.

    `take` receives one message from the socket with NOBLOCK and handles it; it raises `zmq.Again` if there is
    none, and lets no other `zmq.Again` escape.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], take: Callable[[], None], writable: Callable[[], None] | None = None
    ) -> None:
        self._socket = socket
        self._take = take
        self._writable = writable
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._poked = False
        self._paused = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self.drain)
        self._timer = self._loop.call_later(FALLBACK_S, self._on_timer)
        self.poke()

    def poke(self) -> None:
        """Read the socket in the next iteration of the loop."""
        if not self._poked and not self._closed:
            self._poked = True
            self._loop.call_soon(self._on_poke)

    def pause(self) -> None:
        """Stop reading: ZeroMQ's queues fill up and the peers' sends wait."""
        self._paused = True

    def resume(self) -> None:
        """Read again after `pause`. Idempotent."""
        if self._paused:
            self._paused = False
            self.poke()

    def drain(self) -> None:
        """Take what has arrived, at most `BATCH` messages."""
        if self._closed:
            return
        take = self._take
        try:
            for _ in range(BATCH):
                if self._paused:
                    # clears the descriptor, which would otherwise wake the loop at once
                    self._socket.getsockopt(zmq.EVENTS)
                    break
                take()
                if self._closed:
                    return
            else:
                self.poke()
        except zmq.Again:
            pass
        if self._writable is not None:
            self._writable()

    def close(self) -> None:
        """Remove the callbacks from the loop; to be called before the socket is closed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._loop.remove_reader(self._descriptor)

    def _on_poke(self) -> None:
        self._poked = False
        self.drain()

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(FALLBACK_S, self._on_timer)
        self.drain()
