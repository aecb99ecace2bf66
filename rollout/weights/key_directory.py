"""Names the keys of the bus with which the processes of an engine fetch weights. No torch here."""

import os
from pathlib import Path

KEYS = "_TETHER_CURVE_DIR"
"""Environment variable: directory of the bus's keys."""


def fetch_with_keys(directory: str) -> None:
    """Have this process, and engine processes that it starts, fetch weights with these keys; empty: none."""
    if directory:
        os.environ[KEYS] = str(Path(directory).absolute())
    else:
        os.environ.pop(KEYS, None)
