"""Names the versions that a benchmark ran with."""

import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, of the packages that are installed, and of this repository."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if commit := output_of("git", "describe", "--always", "--dirty", "--abbrev=12"):
        found["commit"] = commit
    return found


def output_of(*command: str) -> str:
    """Return what a short command prints, empty if it cannot be run."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    return ""
