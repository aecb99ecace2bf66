"""Connects to the sender, `trainer/weights/served/version_server.py`, and requests versions."""

import os
import select
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

from protocol.errors import SettingsError, WeightError
from protocol.host.key_proof import KEY_DIR_VARIABLE
from protocol.host.line_connection import LineConnection
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from rollout.weights.verification import Deadline

MAX_LINE = 16 << 20
"""Maximum size of an answer, bytes; a bucket handle takes a few hundred, and there may be tens of thousands.
"""
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""`poll` event for a disconnect of the other end; on systems other than Linux it may come later."""


class SenderConnection(LineConnection):
    """Persistent connection to the sender."""

    def __init__(self, host: str, port: int, deadline: Deadline) -> None:
        """Connect; authenticate both ends if `fetch_with_keys` named a directory.

        Raises:
            OSError: the sender is unreachable or has disconnected.
            WeightError: authentication failed on either end, or a key file cannot be read.
        """
        connection = socket.create_connection((host, port), timeout=deadline.remaining("connecting"))
        super().__init__(connection, "the sender", MAX_LINE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._wanted = b""
        self._confirmed = False
        if directory := os.environ.get(KEY_DIR_VARIABLE, ""):
            try:
                self._prove(directory, deadline)
            except BaseException as error:
                self.close()
                if isinstance(error, (SettingsError, ValueError)):
                    raise WeightError(
                        f"{host}:{port} did not prove that it is the trainer of this run: {error}"
                    ) from error
                raise

    def request(
        self, manifest: WeightManifest, deadline: Deadline, wanted: bytes = b"", *, keeps: bool = False
    ) -> dict[str, Any]:
        """Request a version and return the sender's answer.

        Args:
            wanted: encoded slices to send, see `encode_wanted`; transmitted only if changed since the last
                request.
            keeps: whether this end still has the previous version, if it was confirmed on this connection.

        Raises:
            WeightError: the sender refused; the message contains its reason.
            OSError, ValueError: the sender disconnected, or sent invalid JSON.
        """
        request: dict[str, Any] = {
            "version": manifest.version,
            "epoch": manifest.epoch,
            "layout": layout_digest(manifest),
        }
        behind = b""
        if wanted != self._wanted:
            request["slices"], behind = len(wanted), wanted
        if keeps and self._confirmed:
            request["keeps"] = True
        self.send(request, deadline.remaining, behind)
        self._wanted, self._confirmed = wanted, False
        answer = self._answer(deadline)
        if "error" in answer:
            raise WeightError(f"the sender refused version {manifest.version}: {answer['error']}")
        return answer

    def confirm(self, manifest: WeightManifest, deadline: Deadline) -> None:
        """Tell the sender that the whole version was received."""
        self.send({"done": manifest.version}, deadline.remaining)
        self._confirmed = True

    def watch(self, on_hang_up: Callable[[], None]) -> None:
        """Call a function in a separate thread when the sender disconnects or `close` is called."""
        connection = self.socket.dup()  # its number is not reused before the thread has ended
        threading.Thread(
            target=_watch, args=(connection, on_hang_up), name="weights.watch", daemon=True
        ).start()

    def _answer(self, deadline: Deadline) -> dict[str, Any]:
        answer = self.receive(deadline.remaining)
        if answer is None:
            raise ConnectionError("the sender disconnected")
        return answer

    def _prove(self, directory: str, deadline: Deadline) -> None:
        try:
            from protocol.host.key_proof import ReceiverKeys  # an engine's own Python may lack dependencies
        except ModuleNotFoundError as error:
            raise WeightError(f"fetching weights with keys needs the package {error.name}") from error
        keys = ReceiverKeys(directory)
        self.send(keys.hello(), deadline.remaining)
        answer = self._answer(deadline)
        if "error" in answer:
            raise ValueError(answer["error"])
        self.send(keys.answer(answer), deadline.remaining)


def parse_location(location: str, kinds: Collection[str]) -> tuple[str, int, str]:
    """Split "HOST:PORT/KIND".

    Raises:
        WeightError: the location has another form, or the kind is not in `kinds`.
    """
    address, _, kind = location.partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or kind not in kinds:
        raise WeightError(f"location {location!r} is not HOST:PORT/KIND with a kind of {', '.join(kinds)}")
    return host, int(port), kind


def _watch(connection: socket.socket, on_hang_up: Callable[[], None]) -> None:
    with connection:
        ready = select.poll()
        ready.register(connection, HANG_UP)
        ready.poll()
    on_hang_up()
