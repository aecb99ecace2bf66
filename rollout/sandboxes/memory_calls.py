"""Refuses system calls for memory that no limit of a sandbox counts, by a seccomp filter (x86-64).

Memory files and file systems in memory belong to no process, so the sum over processes misses them. Programs
see a kernel without these calls.
"""

import platform
import struct

REFUSED = {"mount": 165, "memfd_create": 319, "fsopen": 430, "fsmount": 432, "memfd_secret": 447}
_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ENOSYS = 0x7FFF0000, 0x00050000 | 38
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


def memory_filter() -> bytes:
    """Return the filter as an array of struct sock_filter; empty on processors other than x86-64.

    It refuses all calls of other architectures, such as those of 32 bits, whose numbers differ.
    """
    if platform.machine() != "x86_64":
        return b""
    refused = sorted(REFUSED.values())
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, len(refused) + 3, _X86_64),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, len(refused) + 1, 0, _X32),
        *((_EQUAL, len(refused) - at, 0, number) for at, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
