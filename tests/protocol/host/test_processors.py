"""Tests what is read of a machine's processors, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from protocol.host.processors import has_bfloat16, processor_name, usable_cores


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
