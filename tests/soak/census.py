"""How many things live in this process: what grows here without end is a leak, however little memory it takes
yet."""

import ctypes
import gc
import os
import sys

_LIBC = ctypes.CDLL(None)


class _Mallinfo(ctypes.Structure):
    """As `man mallinfo2` lists its fields."""

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
    """Blocks that Python's allocator has given out (each object of up to 512 bytes is one at least), open
    descriptors, and the C library's bytes: `malloc` in use, `malloc_free` kept for later.

    `gc.get_objects` would tell more, but a tuple that another thread is building must not be seen by anybody.
    """
    gc.collect()
    info = _LIBC.mallinfo2()
    return {
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "malloc": info.uordblks + info.hblkhd,
        "malloc_free": info.fordblks,
    }
