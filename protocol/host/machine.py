"""Detects the processors and the memory that this process may use.

In a container, Linux reports the whole machine, but control groups (versions 1 and 2) may grant less. The
module reads files, because importing torch takes seconds. In every function, `root` is the directory that
contains /proc and /sys.
"""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""CPU flags of x86 processors that multiply bfloat16 matrices in hardware. On other processors, bfloat16 is
about ten times slower than float32."""


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores that this process may use, at least 1.

    Hyperthreads of a core count once. The number is limited by the process's CPU affinity and by the CPU
    quota of its control groups, rounded down.
    """
    cores = _physical(os.sched_getaffinity(0), root)
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas(root))]))


def has_bfloat16(root: Path = ROOT) -> bool:
    """Return whether the processor multiplies bfloat16 matrices in hardware."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def memory_limit(root: Path = ROOT) -> int:
    """Return the memory limit of processes on this host, bytes: its memory or a control group's limit."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _memory_limits(root))])


def memory_available(root: Path = ROOT) -> int:
    """Return the memory that can be allocated now, bytes; the kernel's file cache counts as free."""
    free = (max(0, limit - used) for limit, used in _memory_limits(root))
    return min([_meminfo(root, "MemAvailable"), *free])


def _physical(threads: Collection[int], root: Path) -> int:
    """Return the number of cores of these hardware threads; without topology, each thread is a core."""
    topology = root / "sys/devices/system/cpu"
    siblings = {thread: _text(topology / f"cpu{thread}/topology/thread_siblings_list") for thread in threads}
    return len({text or f"thread {thread}" for thread, text in siblings.items()})


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group of this process that has one."""
    for version, group in _groups(root, "cpu"):
        texts = _text(group / "cpu.max").split()
        if version == 1:
            texts = [_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        limit, period, *_ = (*map(_number, texts), 0, 0)
        if limit and period:
            yield limit / period


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and usage, bytes, of each control group of this process that has a limit."""
    for version, group in _groups(root, "memory"):
        names = "memory.max", "memory.current", "inactive_file"
        if version == 1:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        limit = _text(group / names[0])
        if limit.isdecimal():  # not "max"
            statistics = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines())
            used = _number(_text(group / names[1])) - _number(statistics.get(names[2], ""))
            yield int(limit), max(0, used)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and directory of each control group of this process, innermost first."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" else 1
        if version == 2 or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / ("" if version == 2 else controller)
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield version, mount / str(group).lstrip("/")


def _meminfo(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _number(text: str) -> int:
    """Return a number of bytes or microseconds; 0 for "max", "-1" and a missing value."""
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
