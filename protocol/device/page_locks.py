"""Locks pages of host memory, so that a GPU reads them itself, at the speed of its bus.

Other memory is copied to buffers first, page by page. Locking takes the driver a while, as does unlocking,
so both are done while an engine generates.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch

log = logging.getLogger("tether.device")


class LockCalls(NamedTuple):
    """Calls that lock and unlock memory, and return an error's number, or 0."""

    lock: Callable[[int, int], int]
    """Takes an address and a number of bytes."""
    unlock: Callable[[int], int]
    """Takes an address that was locked."""


CUDA = LockCalls(
    lambda address, nbytes: int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)),
    lambda address: int(torch.cuda.cudart().cudaHostUnregister(address)),
)


class PageLocks:
    """Storages of the host whose pages are locked, each once."""

    def __init__(self, device: torch.device, calls: LockCalls | None = None) -> None:
        """Begin without a lock.

        Args:
            device: what reads the pages.
            calls: CUDA's if not given; on a device without CUDA `lock` refuses all memory then.
        """
        self._device = device
        self._calls = calls or (CUDA if device.type == "cuda" else None)
        self._locked: dict[int, torch.UntypedStorage] = {}
        """By address."""
        self._unlocking: threading.Thread | None = None
        self.nbytes = 0
        """Bytes that are locked."""

    @property
    def usable(self) -> bool:
        """Whether there are calls to lock pages by."""
        return self._calls is not None

    def lock(self, tensor: torch.Tensor) -> bool:
        """Lock the storage of a tensor, unless it is; return whether it is locked now."""
        storage = tensor.untyped_storage()
        if self._calls is None or not storage.nbytes() or self.holds(tensor):
            return self._calls is not None
        with self._context():
            if error := _error_of(self._calls.lock, storage.data_ptr(), storage.nbytes()):
                log.warning("device.pages_not_locked error=%s locked_mib=%d", error, self.nbytes >> 20)
                with suppress(RuntimeError):
                    torch.ones(1, device=self._device)  # reports it now, else the next kernel would
                return False
        self._locked[storage.data_ptr()] = storage
        self.nbytes += storage.nbytes()
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in locked pages."""
        return tensor.untyped_storage().data_ptr() in self._locked

    def unlock(self) -> None:
        """Unlock all pages in a thread, and release them there; the device must not read them any more."""
        locked, self._locked, self.nbytes = self._locked, {}, 0
        if locked:
            self._unlocking = threading.Thread(
                target=self._unlock, args=(locked, self._unlocking), name="tether-unlock"
            )  # no daemon: calls of CUDA would go on while the interpreter ends
            self._unlocking.start()

    def wait(self, seconds: float) -> bool:
        """Wait until what `unlock` began has ended; return whether it has."""
        if self._unlocking is not None:
            self._unlocking.join(seconds)
        return self._unlocking is None or not self._unlocking.is_alive()

    def _context(self) -> AbstractContextManager[object]:
        """Return a block in which CUDA's calls are about the device; threads begin with another."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _unlock(self, locked: dict[int, torch.UntypedStorage], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
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
    except RuntimeError as error:  # of a torch that checks the number
        return error
