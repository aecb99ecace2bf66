"""Drives one ZeroMQ socket from the event loop.

A socket's descriptor is edge-triggered: it becomes readable when the state may have changed, and any call on
the socket, a send too, may swallow that. So after each wake the socket is read until it has nothing left,
each send is followed by another look (`poke`, once per loop iteration), and a timer looks again in case an
edge was missed all the same.
"""

import asyncio
from collections.abc import Callable

import zmq

MAX_SOCKETS = 16_384
"""Of one context; each link takes three. ZeroMQ's own limit of 1,023 would be 340 receivers."""
_ZERO_COPY_RECV = 10
"""As in zmq.h; pyzmq has no name for it."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose small messages are copied out of the buffer that they were read into.

    ZeroMQ would hand out the buffer itself. Each message that waits, or is held, then holds 18 kB, whatever
    its size, and what one pause of a process with many peers has claimed is not given back.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(_ZERO_COPY_RECV, 0)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


BATCH = 64
"""Frames taken per wake; then other callbacks of the loop get their turn."""
FALLBACK_S = 0.25


class Pump:
    """Calls `take` until it raises `zmq.Again`, and `writable` after a wake that may have made room in a full
    socket.

    `take` receives one message from the socket with NOBLOCK and handles it; it lets no other `zmq.Again`
    escape.
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
        self._timer = self._loop.call_later(FALLBACK_S, self._look_again)
        self.poke()

    def poke(self) -> None:
        """Look at the socket again in the next iteration of the loop."""
        if not self._poked and not self._closed:
            self._poked = True
            self._loop.call_soon(self._poked_drain)

    def pause(self) -> None:
        """Stop reading: ZeroMQ's queues fill up and the peers' sends wait."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.poke()

    def drain(self) -> None:
        """Take what has arrived, at most one batch."""
        if self._closed:
            return
        take = self._take
        try:
            for _ in range(BATCH):
                if self._paused:
                    self._socket.getsockopt(
                        zmq.EVENTS
                    )  # clears the descriptor, which would keep the loop spinning
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
        """Leave the loop; to be called before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._loop.remove_reader(self._descriptor)

    def _poked_drain(self) -> None:
        self._poked = False
        self.drain()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(FALLBACK_S, self._look_again)
        self.drain()
