"""Kills a random process of a run by SIGKILL."""

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import psutil

from tests.integration.command import service_of


def kill_one(up: int, run_dir: Path, rng: random.Random) -> str:
    """Kill a random service of the `tether up` with the pid `up`, or its ledger's server; return its name."""
    found = {name: child.pid for child in psutil.Process(up).children() if (name := service_of(child.pid))}
    found["ledger"] = json.loads((run_dir / "ledger/endpoint.json").read_text())["pid"]
    name = rng.choice(sorted(found))
    with contextlib.suppress(ProcessLookupError):  # it is just being started again
        os.kill(found[name], signal.SIGKILL)
    return name
