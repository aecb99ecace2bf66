"""What receivers share that keep their connection to the sender from one version to the next: nccl and
ipc."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import Chunk
from rollout.weights.base import Destination, no_destination
from rollout.weights.sender_connection import SenderConnection
from rollout.weights.verification import Deadline, Verification, view


class ConnectedReceiver(ABC):
    """Asks, verifies what comes, says that it is done; hangs up when anything goes wrong, and when the sender
    does.

    Used by one thread at a time; `close` may come from another.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._location = ""
        self._line: SenderConnection | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()
        """`close` was called since the last `tensors` began."""
        self._receiving = False
        self._left = False
        """The sender has hung up in the middle."""

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """See `Receiver`."""
        self._ended.clear()
        deadline = Deadline(manifest, deadline_s)
        host, port = self._address(manifest)
        complete = False
        # What is stuck in a library or on the GPU is ended by closing.
        watchdog = threading.Timer(deadline.remaining("starting"), self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._receiving = True
            line, answer = self._ask(host, port, manifest, deadline)
            check = Verification(manifest)
            for piece, memory in self._pieces(answer, manifest, deadline, place):
                for entry in piece.entries:
                    tensor = view(entry, memory, piece.start)
                    check.add(entry, tensor)
                    yield entry, tensor
            self.digest = check.finish(deadline, line.hung_up)
            line.done(manifest, deadline)
            complete = True
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
            deadline.remaining("receiving")
            why = "the sender hung up in the middle" if self._left else error
            raise WeightError(f"version {manifest.version} from {manifest.location}: {why}") from error
        finally:
            watchdog.cancel()
            if not complete:
                self._drain_device()
                self.close()
            self._end_receiving()

    def close(self) -> None:
        """Hang up and release what the transport holds; wakes a thread that waits for an answer or for
        bytes."""
        self._ended.set()
        self._drop()

    @abstractmethod
    def _address(self, manifest: WeightManifest) -> tuple[str, int]:
        """Host and port of the sender. Raises WeightError if the location names none, or this engine cannot
        use it."""

    @abstractmethod
    def _pieces(
        self, answer: dict[str, Any], manifest: WeightManifest, deadline: Deadline, place: Destination
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Every piece of the version with its bytes, uint8; as long as somebody holds those nothing else is
        written there."""

    @abstractmethod
    def _drain_device(self) -> None:
        """Before hanging up in the middle: wait until nothing that was queued touches the sender's memory or
        a tensor's place."""

    @abstractmethod
    def _interrupt(self) -> None:
        """The sender has hung up in the middle: wake who waits for its bytes; called with the lock held."""

    @abstractmethod
    def _release(self) -> None:
        """Give up what belongs to the connection; called with the lock held, once or more often."""

    def _is_disconnected(self) -> bool:
        """Whether there is nobody any more to receive from, or for."""
        line = self._line
        return self._ended.is_set() or line is None or line.hung_up()

    def _drop(self, only: SenderConnection | None = None) -> None:
        """Release what belongs to the connection; if `only` is given, if it is that one."""
        with (
            self._lock
        ):  # also while it is released: when anybody's `close` has returned, nothing is written any more
            line = self._line
            if only is not None and line is not only:
                return
            self._line = None
            if line is not None:
                # first: a sender that waits for its own tensors ends when it sees that, and what we wait for
                # with it
                line.close()
            self._release()

    def _on_hang_up(self, line: SenderConnection) -> None:
        """A connection has ended: what it holds of a sender that is gone is released at once, but not beneath
        a copy that is under way."""
        with self._lock:
            if line is self._line and self._receiving:
                self._left = True
                self._interrupt()
            else:
                self._drop(line)

    def _end_receiving(self) -> None:
        with self._lock:
            self._receiving = False
            if self._line is not None and self._line.hung_up():  # meanwhile, so it was left to us
                self._drop()

    def _ask(
        self, host: str, port: int, manifest: WeightManifest, deadline: Deadline
    ) -> tuple[SenderConnection, dict[str, Any]]:
        """Ask for a version, on the connection that there is; on a new one if the sender has closed it in the
        meantime."""
        line = self._line  # read once: a connection that ends is given up by the thread that watches it
        if line is not None and self._location == manifest.location:
            with suppress(OSError, ValueError):
                return line, line.ask(manifest, deadline)
        self._drop()
        self._left = False
        self._location = manifest.location
        self._line = line = SenderConnection(host, port, deadline)
        line.watch(partial(self._on_hang_up, line))
        if self._ended.is_set():
            raise ConnectionError("the receiver was closed")
        return line, line.ask(manifest, deadline)
