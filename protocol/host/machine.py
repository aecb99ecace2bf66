"""Describes the processors and the memory that this machine offers a process.

Linux alone says neither in a container: control groups (versions 1 and 2) may grant less than there is. Files
are read: importing torch takes seconds. Every function takes `root`, where /proc and /sys are.
"""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""What x86 processors that multiply bfloat16 matrices in hardware have one of. On others bfloat16 is some ten
times slower than float32."""


def usable_cores(root: Path = ROOT) -> int:
    """Return the physical cores that this process may keep busy, at least 1.

    Hyperthreads of a core count once. The process's affinity limits them, and so does the CPU time that its
    control groups grant it, rounded down.
    """
    cores = _physical(os.sched_getaffinity(0), root)
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas(root))]))


def has_bfloat16(root: Path = ROOT) -> bool:
    """Return whether the processor multiplies bfloat16 matrices in hardware."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def memory_limit(root: Path = ROOT) -> int:
    """Return the bytes that processes of this host may have: its memory, or a control group's limit."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _memory_limits(root))])


def memory_available(root: Path = ROOT) -> int:
    """Return the bytes that can be allocated now; files that the kernel only caches count as free."""
    free = (max(0, limit - used) for limit, used in _memory_limits(root))
    return min([_meminfo(root, "MemAvailable"), *free])


def _physical(threads: Collection[int], root: Path) -> int:
    """Return how many cores have these hardware threads; each is its own where the kernel does not say."""
    topology = root / "sys/devices/system/cpu"
    siblings = {thread: _text(topology / f"cpu{thread}/topology/thread_siblings_list") for thread in threads}
    return len({text or f"thread {thread}" for thread, text in siblings.items()})


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU time, in cores, that each control group of this process may use, where it is limited."""
    for version, group in _groups(root, "cpu"):
        texts = _text(group / "cpu.max").split()
        if version == 1:
            texts = [_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        limit, period, *_ = (*map(_number, texts), 0, 0)
        if limit and period:
            yield limit / period


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group of this process that has one, and what it uses, bytes."""
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
    """Yield the version and the directory of each control group of this process, the innermost first."""
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
