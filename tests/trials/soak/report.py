"""Summarizes one run's samples: what has to hold, and what was measured."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.ledger.interface import LedgerStatus
from services.ledger.verify.verifier import AuditResult
from tests.trials.soak.verdict import (
    SLOPE_LIMIT_MB_PER_MIN,
    Sample,
    cpu_shares,
    misplaced,
    rss_slopes,
    settled,
)


def report(
    samples: Sequence[Sample],
    io_cpu_s: Sequence[dict[str, float]],
    group_bytes: Sequence[tuple[int, int]],
    status: LedgerStatus,
    audit: AuditResult,
    log: Path,
) -> dict[str, Any]:
    """Return `ok`, `failures` as sentences, and the figures."""
    first, last = settled(samples)[0], samples[-1]
    seconds = last["time"] - first["time"]
    groups = last["trained"] - first["trained"]
    slopes = rss_slopes(samples)
    found = misplaced(log)
    failures = [
        f"{name}: memory grows by {slope:.2f} MB/min"
        for name, slope in slopes.items()
        if slope >= SLOPE_LIMIT_MB_PER_MIN
    ]
    failures += [f"violation: {text}" for text in audit.violations[:5]]
    if found["doubled"]:
        failures.append(f"groups with two ends: {found['doubled'][:5]}")
    if found["held"]:
        failures.append(f"groups that nobody has handed back: {found['held'][:5]}")
    if status.issued != status.trained + status.dropped + status.active or status.active != len(
        found["open"]
    ):
        failures.append(
            f"issued {status.issued}, trained {status.trained}, dropped {status.dropped}, active "
            f"{status.active}"
        )
    if groups <= 0:
        failures.append("no group was trained")
    calls = {name: last["calls"].get(name, 0) - first["calls"].get(name, 0) for name in last["calls"]}
    return {
        "ok": not failures,
        "failures": failures,
        "seconds": round(samples[-1]["time"] - samples[0]["time"], 1),
        "settled_s": round(seconds, 1),
        "groups": {
            "issued": status.issued,
            "trained": status.trained,
            "dropped": status.dropped,
            "handed_back": status.active,
            "by_reason": dict(status.dropped_by_reason),
        },
        "groups_per_s": round(groups / seconds, 2),
        "steps_per_s": round((last["version"] - first["version"]) / seconds, 3),
        "max_lag": audit.max_lag,
        "rss_mb": {name: round(size / 1e6, 1) for name, size in last["rss"].items()},
        "rss_slope_mb_per_min": {name: round(slope, 3) for name, slope in slopes.items()},
        "cores": {name: round(share, 4) for name, share in cpu_shares(samples).items()},
        "zmq_thread_cores": _io_cores(io_cpu_s),
        "ledger_calls_per_s": {
            name: round(n / seconds, 1)
            for name, n in sorted(calls.items(), key=lambda c: -c[1])
            if n / seconds >= 0.5
        },
        "ledger_keys": [min(s["keys"] for s in samples), max(s["keys"] for s in samples)],
        "ledger_mb": [
            round(min(s["ledger_bytes"] for s in samples) / 1e6, 2),
            round(max(s["ledger_bytes"] for s in samples) / 1e6, 2),
        ],
        "ledger_sizes": {
            name: [min(_sizes(samples, name)), max(_sizes(samples, name))] for name in last["sizes"]
        },
        "ledger_bytes_per_group": [round(size / max(count, 1)) for size, count in group_bytes][-1],
        "files_mb": {name: round(size / 1e6, 2) for name, size in last["files"].items()},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "samples": list(samples),
    }


def _sizes(samples: Sequence[Sample], name: str) -> list[int]:
    return [sample["sizes"].get(name, 0) for sample in samples]


def _io_cores(io_cpu_s: Sequence[dict[str, float]]) -> dict[str, float]:
    if len(io_cpu_s) < 2:
        return {}
    first, last = io_cpu_s[len(io_cpu_s) // 3], io_cpu_s[-1]
    seconds = last["time"] - first["time"]
    return {
        name: round((last[name] - first[name]) / max(seconds, 1e-9), 4) for name in last if name != "time"
    }
