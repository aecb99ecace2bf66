"""Tests what is read of a machine's processors and memory, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from protocol.host.machine import has_bfloat16, memory_available, memory_limit, usable_cores
from tests.benchmarks.record import processor_name

MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\n"}
SECOND = "sys/fs/cgroup"
FIRST = "sys/fs/cgroup/memory"


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def topology(*siblings: str) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list": f"{text}\n"
        for number, text in enumerate(siblings)
    }


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        (topology("0", "1", "2", "3"), 4),
        (topology("0,2", "1,3", "0,2", "1,3"), 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/\n",
          "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
          "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n"}, 3),
        ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
    ],
)  # fmt: skip
def test_usable_cores_are_physical_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert usable_cores(written(tmp_path, files)) == cores


def test_usable_cores_of_this_machine_are_within_its_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512f", False), ("fpu avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True)],
)
def test_bfloat16_is_read_from_the_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    text = f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    root = written(tmp_path, {"proc/cpuinfo": text})
    assert has_bfloat16(root) is expected
    assert processor_name(root) == "Some CPU @ 2 GHz"


def test_a_processor_that_says_nothing_has_no_bfloat16(tmp_path: Path) -> None:
    assert not has_bfloat16(tmp_path)
    assert processor_name(tmp_path) == ""


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, 1000 << 10, 600 << 10),
        ({"proc/self/cgroup": "0::/a/b\n", f"{SECOND}/a/memory.max": "500000\n",
          f"{SECOND}/a/memory.current": "300000\n", f"{SECOND}/a/b/memory.max": "max\n",
          f"{SECOND}/a/memory.stat": "anon 200000\ninactive_file 90000\n"}, 500000, 290000),
        ({"proc/self/cgroup": "0::/\n", f"{SECOND}/memory.max": "9000000\n",
          f"{SECOND}/memory.current": "8999000\n"}, 1000 << 10, 1000),
        ({"proc/self/cgroup": "0::/\n", f"{SECOND}/memory.max": "100\n",
          f"{SECOND}/memory.current": "200\n"}, 100, 0),
        ({"proc/self/cgroup": "4:cpu:/\n3:memory:/job\n", f"{FIRST}/job/memory.limit_in_bytes": "400000\n",
          f"{FIRST}/job/memory.usage_in_bytes": "150000\n",
          f"{FIRST}/job/memory.stat": "cache 9\ntotal_inactive_file 50000\n",
          f"{FIRST}/memory.limit_in_bytes": "9223372036854771712\n"}, 400000, 300000),
    ],
)  # fmt: skip
def test_memory_is_what_the_host_has_and_its_control_groups_grant(
    tmp_path: Path, files: dict[str, str], limit: int, available: int
) -> None:
    root = written(tmp_path, MEMINFO | files)
    assert (memory_limit(root), memory_available(root)) == (limit, available)


def test_this_host_has_memory() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_available() <= memory_limit() <= physical
