"""Drives one ZeroMQ socket from the event loop.

The descriptor of a socket is edge-triggered: it becomes readable when the socket's state may have changed,
and any call on the socket, including a send, may clear it. So each wake reads the socket until it is empty,
each send is followed by another read (`poke`, once per loop iteration), and a timer covers missed edges.
"""

import asyncio
from collections.abc import Callable

import zmq

MAX_SOCKETS = 16_384
"""Maximum number of sockets per context; a link uses three. ZeroMQ's default, 1023, limits to 340
receivers."""
BATCH = 64
"""Maximum number of messages handled per wake, before other callbacks of the loop run."""
FALLBACK_S = 0.25
"""Seconds between two reads by the timer."""
MALLOC_KEPT_BYTES = 8 << 20
"""Freed blocks up to this size in bytes stay in the process."""
_ZERO_COPY_RECV = 10
"""ZMQ_ZERO_COPY_RECV of zmq.h, which pyzmq does not define."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Create a context whose sockets do not linger and copy small messages out of the network buffer.

    Linger is set on the context, because a connection keeps the setting from its socket's creation. Setting
    it only at close may block the end of the context forever.

    By default ZeroMQ passes on the buffer itself. Each queued or held message, even a small one, then
    occupies 18 kB, and memory claimed during a pause of a process with many peers is not returned.

    Allocating and freeing a block of `MALLOC_KEPT_BYTES` first makes glibc keep freed memory. Otherwise each
    frame of 100 KB would be mapped, cleared and returned to the system.
    """
    bytes(MALLOC_KEPT_BYTES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)  # applies to every socket created later
    context.set(_ZERO_COPY_RECV, 0)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class Pump:
    """Callback driver: calls `take` for each message, and `writable` after each wake.

    `take` receives and handles one message with NOBLOCK. `take` must raise `zmq.Again` if and only if there
    is no message. `writable` checks whether a full socket has room again.
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
        """Read the socket in the next loop iteration."""
        if not self._poked and not self._closed:
            self._poked = True
            self._loop.call_soon(self._on_poke)

    def pause(self) -> None:
        """Stop reading, so that ZeroMQ's queues fill up and the peers' sends wait."""
        self._paused = True

    def resume(self) -> None:
        """Resume reading after `pause`. Idempotent."""
        if self._paused:
            self._paused = False
            self.poke()

    def drain(self) -> None:
        """Handle arrived messages, at most `BATCH`."""
        if self._closed:
            return
        take = self._take
        try:
            for _ in range(BATCH):
                if self._paused:
                    # clears the descriptor, which would otherwise wake the loop again at once
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
        """Remove the callbacks from the loop. Call before the socket is closed. Idempotent."""
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
