"""ZeroMQ contexts of the bus."""

import zmq

MAX_SOCKETS = 16_384
"""Of one context; each link takes three. ZeroMQ's own limit of 1,023 would be 340 receivers."""
_ZERO_COPY_RECV = 10
"""As in zmq.h; pyzmq has no name for it."""


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose small messages are copied out of the buffer that they were read into.

    ZeroMQ would hand out the buffer itself. Each message that waits, or is held, then holds 18 kB, whatever its size, and what one pause
    of a process with many peers has claimed is not given back.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(_ZERO_COPY_RECV, 0)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context
