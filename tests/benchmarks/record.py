"""Says when, at which commit, on which hardware and by which command a figure was measured.

Every JSON in results/ has these four under the key `record` (tests/benchmarks/figures/test_claims.py).
"""

import datetime
import os
import platform
import shlex
import sys
from collections import Counter
from pathlib import Path

from tests.benchmarks.versions import output_of


def record_now() -> dict[str, str]:
    """Return the record of the command that runs now."""
    names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    gpus = [f"{count} x {name}" for name, count in Counter(names).items()]
    processor = f"{processor_name() or platform.processor()}, {os.cpu_count()} cores"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12") or "not in a checkout",
        "hardware": "; ".join([*gpus, processor]),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's model name, or "" where it reports none; /proc is in `root`."""
    path = root / "proc/cpuinfo"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
