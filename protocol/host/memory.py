"""Says how much memory this host has for a process, and how much of it is free.

Linux alone says neither in a container: control groups (versions 1 and 2) may grant less than there is.
"""

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int:
    """Return the bytes that processes of this host may have: its memory, or a control group's limit.

    Args:
        root: where /proc and /sys are.
    """
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _groups(root))])


def memory_available(root: Path = ROOT) -> int:
    """Return the bytes that can be allocated now; files that the kernel only caches count as free.

    Args:
        root: where /proc and /sys are.
    """
    free = (max(0, limit - used) for limit, used in _groups(root))
    return min([_meminfo(root, "MemAvailable"), *free])


def _meminfo(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group of this process that has one, and what it uses, bytes."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _limited("sys/fs/cgroup", path, root, _second_version)
        elif "memory" in controllers.split(","):
            yield from _limited("sys/fs/cgroup/memory", path, root, _first_version)


def _limited(
    mount: str, path: str, root: Path, read: Callable[[Path], tuple[str, str, str]]
) -> Iterator[tuple[int, int]]:
    own = PurePosixPath(path)
    for group in (own, *own.parents):
        limit, used, cached = read(root / mount / str(group).lstrip("/"))
        if limit.isdecimal():  # not "max"
            yield int(limit), max(0, _number(used) - _number(cached))


def _second_version(group: Path) -> tuple[str, str, str]:
    cached = _statistic(group, "inactive_file")
    return _text(group / "memory.max"), _text(group / "memory.current"), cached


def _first_version(group: Path) -> tuple[str, str, str]:
    cached = _statistic(group, "total_inactive_file")
    return _text(group / "memory.limit_in_bytes"), _text(group / "memory.usage_in_bytes"), cached


def _statistic(group: Path, name: str) -> str:
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    return next((words[1] for words in lines if words[0] == name), "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
