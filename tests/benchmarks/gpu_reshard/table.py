"""The table of updates by a real trainer, in Markdown, from the JSON that `run` writes.

python -m tests.benchmarks.gpu_reshard.table runs/bench-reshard.json
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.table import grid, number

HEAD = (
    "engine, idle ranks wait on",
    "updates",
    "total ms median / mean",
    "publish",
    "hand over",
    "stage",
    "commit",
    "stands still",
    "stall p50 / max",
    "gap undisturbed p50 / p99",
    "decode during %",
    "decoding lost ms",
    "GB held / extra by rank",
    "verified",
)


def render(facts: Mapping[str, Any]) -> str:
    """Trainer, parts and what failed."""
    trainer, parts = facts["trainer"], facts["parts"]
    ranks = [_gigabytes(rank["after"]) for rank in trainer.get("memory", [])]
    size = f"{trainer.get('bytes', 0) / 1e9:.2f} GB in {trainer.get('tensors', 0)} tensors"
    training = _gigabytes(trainer.get("training_bytes", 0))
    blocks = [
        f"Weight updates by a Megatron trainer, model {facts['model']}, {size}, by {facts['transport']}; "
        f"rank 0 had {training} GB to train, the ranks {' / '.join(ranks)} GB with two versions published"
    ]
    if parts:
        blocks.append(grid([list(HEAD), *([name, *_cells(part)] for name, part in parts.items())]))
    blocks += [f"failed: {name}: {why}" for name, why in facts["failed"].items()]
    return "\n\n".join(blocks)


def line(part: Mapping[str, Any]) -> str:
    """Return the cells of a part in one line."""
    return ", ".join(f"{head} {cell}" for head, cell in zip(HEAD[1:], _cells(part), strict=True))


def _cells(part: Mapping[str, Any]) -> list[str]:
    ms, stall, quiet = part["ms"], part["stall_ms"], part["gaps"].get("undisturbed", {})
    mean = statistics.mean(row["total"] for row in part["rows"])
    share = part["decode"]["share"]
    memory = (f"{_gigabytes(rank['before'])} / {_gigabytes(rank['extra'])}" for rank in part["memory"])
    return [
        str(part["updates"]),
        f"{number(ms['total'])} / {number(mean)}",
        *(number(ms[phase]) for phase in ("publish", "handover", "stage", "commit", "pause_ms")),
        f"{number(stall['p50'])} / {number(stall['max'])}",
        f"{number(quiet.get('p50'))} / {number(quiet.get('p99'))}",
        number(100 * share),
        number((1 - share) * mean),
        "; ".join(memory),
        {True: "yes", False: "NO"}.get(part["verified"], str(part["verified"])),
    ]


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}"


if __name__ == "__main__":
    print(render(json.loads(Path(sys.argv[1]).read_text())))
