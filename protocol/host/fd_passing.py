"""Processes that hold an open file together with the one that they belong to; a lock on it ends when the last
of them has ended.

The processes of an engine are started by libraries that pass no handles on, so they ask for it: at a socket
whose name is made of their owner's pid (Linux: no file, gone with the owner).
"""

import os
import socket
import struct
import threading
from contextlib import suppress

TIMEOUT_S = 10.0
RETRY_S = 0.1
CREDENTIALS = struct.Struct("3i")
"""Of who is at the other end: pid, uid, gid."""


class FdServer:
    """Hands an open file to every process of the same user that asks, in a thread of its own."""

    def __init__(self, handle: int) -> None:
        """Raises OSError if this process gives another one already."""
        self._handle = handle
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_name(os.getpid()))
        self._listener.listen()
        self._thread = threading.Thread(target=self._give, name="tether-heirs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give no more; idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _give(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or out of descriptors for now
                self._closed.wait(RETRY_S)
                continue
            with connection, suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                if _peer(connection)[1] == os.getuid():
                    socket.send_fds(connection, [b"x"], [self._handle])


def receive_fd(owner: int) -> int | None:
    """What process `owner` gives: a handle on its open file, closed when this process ends; None if it gives
    nothing.

    Raises:
        OSError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(_name(owner))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        if _peer(connection)[0] != owner:  # somebody else has taken the name
            return None
        _, handles, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not handles:
            raise ConnectionError(f"process {owner} hung up instead of giving its file")
        return handles[0]


def _name(pid: int) -> bytes:
    """Containers may share a network, and with it such names, but not their pids."""
    with suppress(OSError):
        return f"\0tether-heirs-{os.stat('/proc/self/ns/pid').st_ino}-{pid}".encode()
    return f"\0tether-heirs-{pid}".encode()


def _peer(connection: socket.socket) -> tuple[int, ...]:
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
