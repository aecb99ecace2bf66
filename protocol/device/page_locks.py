"""Locks pages of host memory, which a GPU then reads directly at bus speed.

The driver copies unlocked memory through buffers, page by page. Locking and unlocking are slow, so both run
while an engine generates.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch

log = logging.getLogger("tether.device")


class LockCalls(NamedTuple):
    """Functions that lock and unlock memory; they return an error number, or 0."""

    lock: Callable[[int, int], int]
    """Takes an address and a number of bytes."""
    unlock: Callable[[int], int]
    """Takes a locked address."""


CUDA = LockCalls(
    lambda address, nbytes: int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)),
    lambda address: int(torch.cuda.cudart().cudaHostUnregister(address)),
)


class PageLocks:
    """Host storages with locked pages, each locked once."""

    def __init__(self, device: torch.device, calls: LockCalls | None = None) -> None:
        """Create an empty set of locks.

        Args:
            calls: default: CUDA's functions. Without CUDA, `lock` then refuses all memory.
        """
        self._device = device
        self._calls = calls or (CUDA if device.type == "cuda" else None)
        self._locked: dict[int, torch.UntypedStorage] = {}
        """Address -> storage."""
        self._unlocking: threading.Thread | None = None
        self.nbytes = 0
        """Number of locked bytes."""

    @property
    def usable(self) -> bool:
        """Whether pages can be locked on the device."""
        return self._calls is not None

    def lock(self, tensor: torch.Tensor) -> bool:
        """Lock the storage of a tensor if it is not locked; return whether the storage is locked."""
        storage = tensor.untyped_storage()
        if self._calls is None or not storage.nbytes() or self.holds(tensor):
            return self._calls is not None
        with self._context():
            if error := _error_of(self._calls.lock, storage.data_ptr(), storage.nbytes()):
                log.warning("device.pages_not_locked error=%s locked_mib=%d", error, self.nbytes >> 20)
                with suppress(RuntimeError):
                    torch.ones(1, device=self._device)  # raises the pending error now, not in a later kernel
                return False
        self._locked[storage.data_ptr()] = storage
        self.nbytes += storage.nbytes()
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor is locked."""
        return tensor.untyped_storage().data_ptr() in self._locked

    def unlock(self) -> None:
        """Unlock and release all pages in a thread; the device must no longer read them."""
        locked, self._locked, self.nbytes = self._locked, {}, 0
        if locked:
            self._unlocking = threading.Thread(
                target=self._unlock, args=(locked, self._unlocking), name="tether-unlock"
            )  # no daemon thread: CUDA calls would continue while the interpreter exits
            self._unlocking.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the thread of `unlock`; return whether the thread has ended."""
        if self._unlocking is not None:
            self._unlocking.join(seconds)
        return self._unlocking is None or not self._unlocking.is_alive()

    def _context(self) -> AbstractContextManager[object]:
        """Return a context with the device as current CUDA device; new threads start on device 0."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _unlock(self, locked: dict[int, torch.UntypedStorage], previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        assert self._calls is not None
        with self._context():
            while locked:
                address, storage = locked.popitem()
                if error := _error_of(self._calls.unlock, address):
                    log.warning("device.pages_not_unlocked error=%s", error)
                del storage


def _error_of(call: Callable[..., int], *arguments: int) -> object:
    """Return the error of a call, or 0."""
    try:
        return call(*arguments)
    except RuntimeError as error:  # versions of torch that check the error number raise
        return error
