"""The table that `make bench-gpu` prints, in Markdown, from the JSON that it writes.

python -m tests.benchmarks.gpu.table runs/bench-gpu.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STALL_MS = 12.0
TRANSFER = 1.5
DECODE = 0.9
OURS = ("nccl", "ipc", "shm")
"""Ways of the project: the aims are theirs."""


def render(facts: Mapping[str, Any]) -> str:
    """Limits, ways, phases and what failed."""
    limits = facts["limits"].get("ms", {})
    engine, machine = facts["engine"], facts["limits"].get("machine", {})
    blocks = [
        f"Weight updates, model {facts['model']}, {engine.get('bytes', 0) / 1e9:.2f} GB in "
        f"{engine.get('tensors', 0)} tensors"
    ]
    blocks.append(f"{machine} {facts['versions']}")
    if "memory" in engine:
        blocks.append(f"engine.staging {engine.get('staging')}; started in {number(engine['start_s'])} s")
        blocks.append(f"beside the weights: {gigabytes(engine['memory'])}")
    if limits:
        blocks.append(grid([["limit", "ms"]] + [[name, number(ms)] for name, ms in limits.items()]))
    parts: Mapping[str, Mapping[str, Any]] = facts["parts"]
    if parts:
        blocks.append(
            grid([list(_HEAD), *([name, *_summary(name, part, limits)] for name, part in parts.items())])
        )
        blocks += [f"{name}: {phases(part)}" for name, part in parts.items()]
    blocks += [f"failed: {name}: {why}" for name, why in facts["failed"].items()]
    return "\n\n".join(blocks)


_HEAD = (
    "way",
    "updates",
    "total ms",
    "before commit ms",
    "limit ms",
    "x limit",
    "pause ms",
    "stall ms p50 / max",
    "gap ms undisturbed p50 / p99",
    "decode during",
    "verified",
)


def limit_of(way: str, limits: Mapping[str, float]) -> float | None:
    """The quickest that the same bytes can move between the places that a way moves them between; None if it
    moves nothing."""
    if way.startswith("flip"):
        return None
    if way.endswith("@same"):
        return limits.get("copy on one GPU")
    if way.startswith("shm"):
        both = [limits.get("to pinned host memory"), limits.get("from pinned host memory")]
        return sum(ms for ms in both if ms) or None
    if way.startswith("ipc"):
        return limits.get("copy to a peer")
    return min((ms for name, ms in limits.items() if name.startswith("broadcast")), default=None)


def _summary(way: str, part: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    ms, stall, decode = part["ms"], part["stall_ms"], part["decode"]
    aims = way.partition("@")[0] in OURS
    before = ms["total"] - ms.get("commit", 0.0)
    limit = limit_of(way, limits)
    quiet = part["gaps"].get("undisturbed", {})
    return [
        str(part["updates"]),
        number(ms["total"]),
        number(before),
        number(limit),
        "" if limit is None else _aimed(before / limit, before / limit <= TRANSFER, aims),
        number(ms.get("pause_ms")),
        f"{number(stall['p50'])} / {_aimed(stall['max'], stall['max'] <= STALL_MS, aims)}",
        f"{number(quiet.get('p50'))} / {number(quiet.get('p99'))}",
        _aimed(100 * decode["share"], decode["share"] >= DECODE, aims) + " %",
        {True: "yes", False: "NO", None: ""}.get(part.get("verified"), "?"),
    ]


def phases(part: Mapping[str, Any]) -> str:
    """Milliseconds of each phase, and the gaps that requests saw in it."""
    found = []
    for name, ms in part["ms"].items():
        gaps = part["gaps"].get(name, {"n": 0})
        seen = (
            f" (gaps p50 {number(gaps['p50'])}, p99 {number(gaps['p99'])}, max {number(gaps['max'])})"
            if gaps["n"]
            else ""
        )
        found.append(f"{name} {number(ms)}{seen}")
    tokens = part["token_gaps"]
    stream = "; ".join(
        f"{name} {number(gap['p50'])}/{number(gap['p99'])}/{number(gap['max'])}"
        for name, gap in tokens.items()
        if gap["n"]
    )
    decode = part["decode"]
    speeds = f"{number(decode['undisturbed'])} undisturbed, {number(decode['during'])} during updates"
    return "\n  ".join(
        (
            ", ".join(found),
            f"gaps of a streamed request, ms p50/p99/max: {stream}",
            f"decode tokens/s: {speeds}, {number(decode['before_commit'])} before their last phase",
            f"after them: {gigabytes(part.get('memory', {}).get('engine', {}))}; "
            f"verified: {part.get('verified')}",
        )
    )


def _aimed(value: float, reached: bool, aims: bool) -> str:
    return number(value) + ("" if not aims else " reached" if reached else " MISSED")


def number(value: float | None) -> str:
    """Three digits, or a whole number from a thousand on."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def gigabytes(memory: Mapping[str, int]) -> str:
    """Return the engine's memory, in GB but for the tokens that its KV cache holds."""
    shown = {name: str(n) if name.endswith("tokens") else f"{n / 1e9:.2f}" for name, n in memory.items()}
    return ", ".join(f"{name} {text}" for name, text in shown.items())


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the head first, as a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


if __name__ == "__main__":
    print(render(json.loads(Path(sys.argv[1]).read_text())))
