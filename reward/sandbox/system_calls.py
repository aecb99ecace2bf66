"""Defines the system calls allowed for model code, and compiles them to a seccomp filter (x86-64).

System calls in no table below are refused. `reward/sandbox/runner.py` passes the finished filters to
`reward/sandbox/child.py`, which cannot import the project.

Source of the numbers: arch/x86/entry/syscalls/syscall_64.tbl of Linux.
"""

import platform
import struct
from functools import cache

ALLOWED = {
    # descriptors
    "read": 0, "write": 1, "close": 3, "lseek": 8, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
    "pipe": 22, "dup": 32, "dup2": 33, "sendfile": 40, "dup3": 292, "pipe2": 293, "preadv": 295,
    "pwritev": 296, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "close_range": 436,
    # files and directories
    "stat": 4, "fstat": 5, "lstat": 6, "access": 21, "flock": 73, "fsync": 74, "fdatasync": 75,
    "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95,
    "mknod": 133, "statfs": 137, "fstatfs": 138, "readahead": 187, "getdents64": 217, "fadvise64": 221,
    "mkdirat": 258, "mknodat": 259, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "fallocate": 285, "renameat2": 316, "statx": 332,
    "faccessat2": 439,
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "mincore": 27,
    "madvise": 28, "get_mempolicy": 239,
    # waiting
    "poll": 7, "select": 23, "pause": 34, "epoll_create": 213, "restart_syscall": 219, "epoll_wait": 232,
    "epoll_ctl": 233, "pselect6": 270, "ppoll": 271, "epoll_pwait": 281, "signalfd": 282,
    "timerfd_create": 283, "eventfd": 284, "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd4": 289,
    "eventfd2": 290, "epoll_create1": 291, "epoll_pwait2": 441,
    # connected sockets
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51,
    "getpeername": 52, "getsockopt": 55, "recvmmsg": 299, "sendmmsg": 307,
    # processes and threads
    "sched_yield": 24, "fork": 57, "vfork": 58, "execve": 59, "exit": 60, "wait4": 61, "arch_prctl": 158,
    "futex": 202, "set_tid_address": 218, "exit_group": 231, "waitid": 247, "set_robust_list": 273,
    "execveat": 322, "membarrier": 324, "rseq": 334, "pidfd_open": 434,
    # signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "kill": 62, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigqueueinfo": 129, "rt_sigsuspend": 130, "sigaltstack": 131, "tkill": 200,
    "tgkill": 234, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
    # identity; without capabilities a process can only switch between its own identities
    "getpid": 39, "uname": 63, "getuid": 102, "getgid": 104, "setuid": 105, "setgid": 106, "geteuid": 107,
    "getegid": 108, "setpgid": 109, "getppid": 110, "getpgrp": 111, "setsid": 112, "setreuid": 113,
    "setregid": 114, "getgroups": 115, "setresuid": 117, "getresuid": 118, "setresgid": 119,
    "getresgid": 120, "getpgid": 121, "getsid": 124, "capget": 125, "gettid": 186,
    # time
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "gettimeofday": 96, "times": 100,
    "time": 201, "timer_create": 222, "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225,
    "timer_delete": 226, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    # limits, scheduling, randomness
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "getpriority": 140, "sched_getparam": 143,
    "sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147,
    "sched_rr_get_interval": 148, "setrlimit": 160, "sched_setaffinity": 203, "sched_getaffinity": 204,
    "getcpu": 309, "getrandom": 318,
}  # fmt: skip
"""System calls that are allowed with any arguments, and their numbers."""
OWN_FILES = {
    "truncate": 76, "chmod": 90, "fchmod": 91, "utime": 132, "utimes": 235, "futimesat": 261,
    "fchmodat": 268, "utimensat": 280, "fchmodat2": 452,
}  # fmt: skip
"""System calls that modify a file by path, without opening the file for writing.

Landlock does not control them (truncate: from ABI 3 on). They are allowed only if everything except the
working directory is mounted read-only, so they can only change the code's own files."""

_ALL = 0xFFFFFFFF
_ACCESS, _CUT = 0o3, 0o1000  # O_ACCMODE; O_TRUNC, which is refused for read-only files
_OPENED = (0, 1, 2, 1 | _CUT, 2 | _CUT)
_NEW_NAMESPACES = 0x7E020000
_STREAM, _UNIX = 1, 1
CHECKED: dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    2: ((1, _ACCESS | _CUT, _OPENED),),  # open
    257: ((2, _ACCESS | _CUT, _OPENED),),  # openat
    # ioctl: of terminals TCGETS, TIOCGPGRP, TIOCGWINSZ; FIONBIO, FIONREAD, FIONCLEX, FIOCLEX; FICLONE
    16: ((1, _ALL, (0x5401, 0x540F, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451, 0x40049409)),),
    # fcntl: copies, flags and locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; no leases, notifications or larger pipes
    72: ((1, _ALL, (*range(8), 36, 37, 38, 1030, 1032)),),
    # socketpair: streams only; a datagram socket pair could send to every socket with a path
    53: ((0, _ALL, (_UNIX,)), (1, 0xF, (_STREAM,))),
    56: ((0, _NEW_NAMESPACES, (0,)),),  # clone
    # prctl: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS,
    # PR_SET_VMA
    157: ((0, _ALL, (3, 15, 16, 21, 23, 39, 0x53564D41)),),
    141: ((0, _ALL, (0,)), (1, _ALL, (0,))),  # setpriority: of this process
    302: ((0, _ALL, (0,)),),  # prlimit64: of this process
}
"""Number -> (argument, mask, values): allowed if each of these arguments, masked, has one of its values.

Only the lower 32 bits are compared, because the kernel reads each of these arguments as 32 bits."""
ATTRIBUTES = range(188, 200)
"""setxattr to fremovexattr: EOPNOTSUPP, as from a file system without attributes."""
NEWER = 424
"""System calls from this number on (Linux 5.1) fail with ENOSYS, so programs assume an older kernel."""

_AUDIT_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EOPNOTSUPP = _ERRNO | 1, _ERRNO | 38, _ERRNO | 95
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

Line = tuple[int, int, int, int]
"""One instruction of classic BPF: code, jump if true, jump if false, operand."""


@cache
def seccomp_filter(own_files: bool) -> bytes:
    """Return a filter as an array of struct sock_filter; empty on processors other than x86-64.

    Args:
        own_files: whether `OWN_FILES` are allowed.
    """
    if platform.machine() != "x86_64":
        return b""
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in sorted((ALLOWED | (OWN_FILES if own_files else {})).values()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, checks in CHECKED.items():
        block = [line for check in checks for line in _check(*check)] + [(_RETURN, 0, 0, _ALLOW)]
        lines += [(_EQUAL, 0, len(block), number), *block]
    lines += [
        (_AT_LEAST, 0, 1, NEWER),
        (_RETURN, 0, 0, _ENOSYS),
        (_AT_LEAST, 0, 2, ATTRIBUTES.start),
        (_AT_LEAST, 1, 0, ATTRIBUTES.stop),
        (_RETURN, 0, 0, _EOPNOTSUPP),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _check(argument: int, mask: int, values: tuple[int, ...]) -> list[Line]:
    """Return lines that refuse the call unless an argument, masked, has one of the values."""
    return [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_AND, 0, 0, mask),
        *((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)),
        (_RETURN, 0, 0, _EPERM),
    ]
