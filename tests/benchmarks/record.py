"""Says when, at which commit, on which hardware and by which command a figure was measured.

Every JSON in results/ has these four under the key `record` (tests/benchmarks/figures/test_figures.py).
"""

import datetime
import os
import platform
import shlex
import sys

from protocol.host.processors import processor_name
from tests.benchmarks.versions import output_of


def record_now(hardware: str = "") -> dict[str, str]:
    """Return the record of the command that runs now; `hardware` names the GPUs, without it the processor."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "hardware": hardware or f"{processor_name() or platform.processor()}, {os.cpu_count()} cores",
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }
