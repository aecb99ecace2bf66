"""Tests what is read of a host's memory, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from protocol.host.memory import memory_available, memory_limit
from tests.protocol.host.test_processors import written

MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\n"}
SECOND = "sys/fs/cgroup"
FIRST = "sys/fs/cgroup/memory"


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
