"""Describes the processors that this machine offers a process.

Reads files only: importing torch takes seconds.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""What x86 processors that multiply bfloat16 matrices in hardware have one of. On others bfloat16 is some ten
times slower than float32."""


def usable_cores(root: Path = ROOT) -> int:
    """Return the physical cores that this process may keep busy, at least 1.

    Hyperthreads of a core count once. The process's affinity limits them, and so does the CPU time that its
    control groups (versions 1 and 2) grant it, rounded down.

    Args:
        root: where /proc and /sys are.
    """
    cores = _physical(os.sched_getaffinity(0), root)
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas(root))]))


def has_bfloat16(root: Path = ROOT) -> bool:
    """Return whether the processor multiplies bfloat16 matrices in hardware.

    Args:
        root: where /proc is.
    """
    lines = _text(root / "proc/cpuinfo").splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def processor_name(root: Path = ROOT) -> str:
    """Return the processor's model name, or "" where it reports none.

    Args:
        root: where /proc is.
    """
    lines = _text(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _physical(threads: Collection[int], root: Path) -> int:
    """Return how many cores have these hardware threads; each is its own where the kernel does not say."""
    topology = root / "sys/devices/system/cpu"
    siblings = {thread: _text(topology / f"cpu{thread}/topology/thread_siblings_list") for thread in threads}
    return len({text.strip() or f"thread {thread}" for thread, text in siblings.items()})


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU time, in cores, that each control group of this process may use, where it is limited."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _quotas_of("sys/fs/cgroup", path, root, _second_version)
        elif "cpu" in controllers.split(","):
            yield from _quotas_of("sys/fs/cgroup/cpu", path, root, _first_version)


def _quotas_of(mount: str, path: str, root: Path, read: Callable[[Path], tuple[int, int]]) -> Iterator[float]:
    own = PurePosixPath(path)
    for group in (own, *own.parents):
        limit, period = read(root / mount / str(group).lstrip("/"))
        if limit > 0 and period > 0:
            yield limit / period


def _second_version(group: Path) -> tuple[int, int]:
    limit, period = (*_text(group / "cpu.max").split(), "", "")[:2]
    return _number(limit), _number(period)


def _first_version(group: Path) -> tuple[int, int]:
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    limit, period = (_number(_text(group / name).strip()) for name in names)
    return limit, period


def _number(text: str) -> int:
    """Return a number of microseconds; 0 for "max", "-1" and a missing value."""
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
