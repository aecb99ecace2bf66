"""Makes the place where a run under chaos lives: directories, small file systems, clocks that can be set."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.trials.chaos.schedule import KINDS, SERVICES

PRIVATE = "CHAOS_PRIVATE_MOUNTS"
"""Set in the environment of a process whose mounts nobody else sees."""
SIZES_MB = {"run": 96, "redis": 96, "shm": 24}
ENTRANCES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])


def enter_private(*namespaces: str) -> None:
    """Start this program again in namespaces of its own, such as "net", that end with it.

    Returns if it is in them, or where the machine does not permit that: then `PRIVATE` is not in the
    environment.
    """
    if PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    for entrance in ENTRANCES:
        entered = [*entrance, *(f"--{name}" for name in namespaces)]
        probe = subprocess.run(
            [*entered, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
        )
        if probe.returncode == 0:
            os.environ[PRIVATE] = "1"
            os.execvp(entered[0], [*entered, sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True)
class Place:
    """Directories of one chaos run."""

    root: Path
    mounts: Mapping[str, Path]
    """Small file systems by name; empty where none can be mounted."""
    clock_library: Path | None
    """libfaketime, where it is installed."""

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of faults that this machine permits."""
        permitted = {"fill": bool(self.mounts), "skew": self.clock_library is not None}
        return tuple(kind for kind in KINDS if permitted.get(kind, True))

    def variables(self) -> dict[str, str]:
        """Return the environment of every process of the run."""
        return {
            "TMPDIR": str(self.root / "tmp"),
            "CHAOS_ROOT": str(self.root),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
        }

    def with_clock(self, name: str, program: str, clock: str, *before: str) -> Path:
        """Return a command that starts `program` with the clock of file clocks/`clock`.

        `clock` is expanded by the shell. The libraries `before` are loaded before libfaketime.
        """
        script = self.root / name
        lines = ["#!/bin/sh"]
        if self.clock_library is not None:
            lines += [
                f'export LD_PRELOAD="{" ".join([*before, str(self.clock_library)])}" '
                f'FAKETIME_TIMESTAMP_FILE="{self.root}/clocks/{clock}"',
                "export FAKETIME_CACHE_DURATION=1 FAKETIME_DISABLE_SHM=1 FAKETIME_DONT_FAKE_MONOTONIC=1 "
                "NO_FAKE_STAT=1",
            ]
        script.write_text("\n".join([*lines, f'exec "{program}" "$@"', ""]))
        script.chmod(0o755)
        return script

    def set_clock(self, name: str, offset_s: int) -> None:
        """Shift the clock of a service by so much, from now on."""
        aside = self.root / "clocks" / f"{name}.tmp"
        aside.write_text(f"{offset_s:+d}\n")
        aside.replace(self.root / "clocks" / name)

    def close(self) -> None:
        """Remove the directories and mounts."""
        for path in self.mounts.values():
            subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
        shutil.rmtree(self.root)


def make_place(root: Path) -> Place:
    """Make the directories below `root`, and mount small file systems if this process has its own mounts."""
    for name in ("run", "redis", "tmp", "clocks"):
        (root / name).mkdir(parents=True)
    mounts = (
        {"run": root / "run", "redis": root / "redis", "shm": Path("/dev/shm")}
        if PRIVATE in os.environ
        else {}
    )
    for name, path in mounts.items():
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZES_MB[name]}m", "tmpfs", str(path)], check=True
        )
    found = importlib.util.find_spec("libfaketime")
    library = (
        next(Path(found.submodule_search_locations[0]).rglob("libfaketime.so.1"), None)
        if found and found.submodule_search_locations
        else None
    )
    place = Place(root, mounts, library)
    for name in (*SERVICES, *map("spare.{}".format, SERVICES), "redis"):
        place.set_clock(name, 0)
    return place
