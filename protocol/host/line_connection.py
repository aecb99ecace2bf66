"""Sends and receives lines of JSON on a TCP connection, and raw bytes after a line that announces them.

Every blocking call takes a function that returns the seconds left and raises after the deadline.
"""

import json
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Remaining = Callable[[], float]
"""Returns the seconds until a deadline; raises after the deadline."""
READ_BYTES = 1 << 16


class LineConnection:
    """One end of a connection, with a buffer of unread bytes."""

    def __init__(self, connection: socket.socket, peer: str, longest: int) -> None:
        """Wrap a connected socket.

        Args:
            longest: maximum length of a line, bytes.
        """
        self.socket = connection
        self.peer = peer
        """Name of the other end in error messages."""
        self._longest = longest
        self._rest = b""

    def receive(self, remaining: Remaining) -> dict[str, Any] | None:
        """Return the object on the next line; an empty object if the line holds another JSON value.

        Returns:
            None if the other end disconnected before the start of a line.

        Raises:
            OSError, ValueError: the other end disconnected within a line, or sent no line of JSON.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > self._longest:
                raise ValueError(f"{self.peer} sent no line of JSON")
            self.socket.settimeout(remaining())
            part = self.socket.recv(READ_BYTES)
            if not part and not self._rest:
                return None
            if not part:
                raise ConnectionError(f"{self.peer} disconnected within a line")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        return found if isinstance(found, dict) else {}

    def raw(self, nbytes: int, remaining: Remaining) -> bytes:
        """Return the next `nbytes` raw bytes. Raises OSError if the other end disconnects first."""
        parts, missing = [self._rest[:nbytes]], nbytes - len(self._rest[:nbytes])
        self._rest = self._rest[nbytes:]
        while missing:
            self.socket.settimeout(remaining())
            part = self.socket.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionError(f"{self.peer} disconnected")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def send(self, message: dict[str, Any], remaining: Remaining, payload: bytes = b"") -> None:
        """Send a line, followed by raw bytes. Raises OSError."""
        self.send_raw(json.dumps(message).encode() + b"\n" + payload, remaining)

    def send_raw(self, data: bytes, remaining: Remaining) -> None:
        """Send bytes. Raises OSError."""
        self.socket.settimeout(remaining())
        self.socket.sendall(data)

    def readable(self, seconds: float = 0.0) -> bool:
        """Return whether data arrives, or the other end disconnects, within `seconds`.

        Raises:
            ConnectionError: this end is closed.
        """
        if self._rest:
            return True
        if self.socket.fileno() < 0:
            raise ConnectionError("the connection was closed")
        ready = select.poll()  # `select` cannot handle descriptors over 1023
        ready.register(self.socket, select.POLLIN)
        return bool(ready.poll(1e3 * seconds))

    def disconnected(self, seconds: float = 0.0) -> bool:
        """Return whether either end disconnects within `seconds`, with all bytes read."""
        try:
            return self.readable(seconds) and not self._rest and not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def shut_down(self) -> None:
        """Disconnect immediately, which also wakes threads that wait on the connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect and close the socket. Idempotent."""
        self.shut_down()
        self.socket.close()


class TimedLine:
    """Connection with a deadline, which implements `protocol.device.pair_group.JsonConnection`."""

    def __init__(self, connection: LineConnection, remaining: Remaining) -> None:
        self._connection = connection
        self._remaining = remaining

    def send(self, message: dict[str, Any]) -> None:
        self._connection.send(message, self._remaining)

    def receive(self) -> dict[str, Any] | None:
        return self.wait() if self._connection.readable() else None

    def wait(self) -> dict[str, Any]:
        """Return the next object. Raises OSError, ValueError, or the deadline's error."""
        message = self._connection.receive(self._remaining)
        if message is None:
            raise ConnectionError(f"{self._connection.peer} disconnected")
        return message

    def raw(self, nbytes: int) -> bytes:
        """Return the next `nbytes` raw bytes. Raises as `LineConnection.raw`."""
        return self._connection.raw(nbytes, self._remaining)
