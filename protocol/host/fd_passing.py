"""Passes a file descriptor to other processes, which then share a flock on the file until all have exited.

Libraries that start an engine's processes do not pass descriptors on. The processes therefore request the
descriptor (SCM_RIGHTS) at an abstract Unix socket (Linux). The socket is named after its owner's pid and
disappears with the owner.
"""

import os
import socket
import struct
import threading
from contextlib import suppress

TIMEOUT_S = 10.0
RETRY_S = 0.1
CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED of the other end: pid, uid, gid."""


class FdServer:
    """Server thread that passes one descriptor to every requesting process of the same user."""

    def __init__(self, handle: int) -> None:
        """Start to serve descriptor `handle`. Raises OSError if this process already serves a descriptor."""
        self._handle = handle
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_name(os.getpid()))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="tether-heirs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or temporarily out of descriptors
                self._closed.wait(RETRY_S)
                continue
            with connection, suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                if _peer(connection)[1] == os.getuid():
                    socket.send_fds(connection, [b"x"], [self._handle])


def receive_fd(owner: int) -> int | None:
    """Return the descriptor that process `owner` serves, or None if it does not serve any.

    Raises:
        OSError: the owner does not answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(_name(owner))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        if _peer(connection)[0] != owner:  # another process uses the name
            return None
        _, handles, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not handles:
            raise ConnectionError(f"process {owner} closed the connection without passing its file")
        return handles[0]


def _name(pid: int) -> bytes:
    """Return the name of the socket.

    The name contains the pid namespace, because containers may share a network but not pids.
    """
    with suppress(OSError):
        return f"\0tether-heirs-{os.stat('/proc/self/ns/pid').st_ino}-{pid}".encode()
    return f"\0tether-heirs-{pid}".encode()


def _peer(connection: socket.socket) -> tuple[int, ...]:
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
