"""Samples a run from outside: memory and CPU of its processes, the ledger's memory, groups by state."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import redis

from services.ledger.redis.keys import NAMES, Keys

IO_THREADS = ("ZMQbg/IO/", "ZMQbg/Reaper")
GROUP_KEYS = (
    "groups",
    "waiting",
    "leases",
    "live",
    "expired",
    "scored",
    "fresh",
    "taken",
    "trained",
    "dropped",
    "requests",
)
"""Keys of the ledger that hold something for each group."""


class Probe:
    """Samples the processes of one run."""

    def __init__(self, pids: Mapping[str, int], url: str, run: str, run_dir: Path) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._redis = redis.Redis.from_url(url)
        self._keys = Keys(run)
        self._run_dir = run_dir

    def sample(self) -> dict[str, Any]:
        """Return all figures that are cheap to take.

        `rss` (bytes) and `cpu` (seconds so far) by process, and the ledger's counters.
        """
        memory, stats = self._redis.info("memory"), self._redis.info("commandstats")
        run = {
            key.decode(): value.decode() for key, value in self._redis.hgetall(self._keys.of("run")).items()
        }
        return {
            "time": time.time(),
            "rss": {name: process.memory_info().rss for name, process in self._processes.items()},
            "cpu": {name: _cpu_s(process) for name, process in self._processes.items()},
            "descriptors": {name: process.num_fds() for name, process in self._processes.items()},
            "ledger_bytes": memory["used_memory"],
            "keys": self._redis.dbsize(),
            "sizes": self._sizes(),
            "calls": {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()},
            **{
                name: int(run[name])
                for name in ("version", "issued", "trained", "dropped", "sequence", "checkpoint")
            },
            "files": self._files(),
        }

    def io_cpu_s(self) -> dict[str, float]:
        """Return CPU seconds so far of ZeroMQ's own threads, by process."""
        return {name: _io_cpu_s(process) for name, process in self._processes.items()}

    def group_bytes(self) -> int:
        """Return the memory of all keys that hold an entry per group."""
        names = (self._keys.of(name) for name in GROUP_KEYS if name in NAMES)
        return sum(self._redis.memory_usage(name, samples=0) or 0 for name in names)

    def close(self) -> None:
        self._redis.close()

    def _sizes(self) -> dict[str, int]:
        """Return the number of entries of each key that is a collection."""
        commands = {"hash": "HLEN", "zset": "ZCARD", "set": "SCARD", "list": "LLEN", "stream": "XLEN"}
        found = {}
        for name in NAMES:
            kind = self._redis.type(self._keys.of(name)).decode()
            if kind in commands:
                found[name] = int(self._redis.execute_command(commands[kind], self._keys.of(name)))
        return found

    def _files(self) -> dict[str, int]:
        """Return the bytes of the files that the run writes."""
        paths = {
            "spool": "spool.sqlite",
            "spool_wal": "spool.sqlite-wal",
            "audit": "audit.jsonl",
            "metrics": "metrics.jsonl",
        }
        return {
            name: path.stat().st_size
            for name, file in paths.items()
            if (path := self._run_dir / file).exists()
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _io_cpu_s(process: psutil.Process) -> float:
    seconds = 0.0
    for thread in process.threads():
        try:
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text()
        except FileNotFoundError:
            continue
        if name.startswith(IO_THREADS):
            seconds += thread.user_time + thread.system_time
    return seconds
