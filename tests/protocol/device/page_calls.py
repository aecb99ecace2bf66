"""mlock(2) and munlock(2) as the calls of `PageLocks`, on a machine without CUDA."""

import ctypes
from pathlib import Path

from protocol.device.page_locks import LockCalls

LIBC = ctypes.CDLL(None, use_errno=True)


def kernel_calls(limit: int = 1 << 30, refused: int = 0) -> LockCalls:
    """Return calls that lock `limit` ranges at most, and then return the error `refused`."""
    sizes: dict[int, int] = {}

    def lock(address: int, nbytes: int) -> int:
        if len(sizes) >= limit:
            return refused
        sizes[address] = nbytes
        done = LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        return ctypes.get_errno() if done else 0

    def unlock(address: int) -> int:
        done = LIBC.munlock(ctypes.c_void_p(address), ctypes.c_size_t(sizes.pop(address)))
        return ctypes.get_errno() if done else 0

    return LockCalls(lock, unlock)


def locked_kib(path: Path | str) -> int:
    """Return how much of the files below a path is locked in this process, KiB."""
    total, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            is_below = str(path) in rest
        elif is_below and first == "Locked:":
            total += int(rest.split()[0])
    return total
