"""Counts the objects of this process: what grows without bound is a leak, however small it is yet."""

import ctypes
import gc
import os
import sys

_LIBC = ctypes.CDLL(None)


class _Mallinfo(ctypes.Structure):
    """Fields of `man mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


_LIBC.mallinfo2.restype = _Mallinfo


def census() -> dict[str, int]:
    """Count allocated blocks, open descriptors and bytes of the C library.

    Blocks are those of Python's allocator (each object of up to 512 bytes is at least one); of the C library,
    `malloc` is in use and `malloc_free` kept for later. `gc.get_objects` would show more, but must not see a
    tuple that another thread is building.
    """
    gc.collect()
    info = _LIBC.mallinfo2()
    return {
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "malloc": info.uordblks + info.hblkhd,
        "malloc_free": info.fordblks,
    }
