"""`make bench-check`: runs what a CPU can, and compares its ratios with the recorded ones.

    python -m tests.benchmarks.check [--only bus,ledger,loop,real,trainer] [--found DIR]

A ratio divides two figures of one run, so that it means the same on another machine, if not exactly. The exit
code is 1 where one is more than 10 % worse than in results/, or a run failed. A ratio whose reference is a
program that is not installed here is named, and not compared. `--found` compares the JSON that an earlier
call left in a directory, and runs nothing.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.figures.claims import find
from tests.benchmarks.versions import ROOT

WORSE = 0.10
"""Largest share by which a ratio may be worse than recorded."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio within one run: where it is in the JSON of `section`, and whether less is better."""

    section: str
    file: str
    path: str
    less_is_better: bool = False


RATIOS = (
    Ratio("bus", "bench.json", "figures/bus.ratio_to_bare_zmq/ratio"),
    Ratio("ledger", "bench.json", "figures/ledger.calls_per_group/value", less_is_better=True),
    Ratio("ledger", "bench.json", "figures/ledger.lifecycles_per_s/ratio"),
    Ratio("loop", "bench.json", "figures/loop.speedup_e1_over_e0/ratio"),
    Ratio("real", "bench.json", "figures/real.e1_steps_per_s/ratio"),
    Ratio("trainer", "bench-trainer.json", "figures/packed_over_padded/value"),
    Ratio("trainer", "bench-trainer.json", "figures/ours_over_hf/value"),
    Ratio("trainer", "bench-trainer.json", "figures/logprobs_over_step/value", less_is_better=True),
)
SECTIONS = tuple(dict.fromkeys(ratio.section for ratio in RATIOS))


def worse_by(recorded: float, found: float, *, less_is_better: bool) -> float:
    """Return the share by which a ratio is worse than recorded, below 0 where it is better."""
    return found / recorded - 1 if less_is_better else 1 - found / recorded


def compare(directory: Path, sections: Iterable[str]) -> list[tuple[Ratio, float, float | None]]:
    """Return for each ratio the recorded one and the found one; None: its reference is not installed here.

    Raises:
        LookupError: a ratio is missing in either JSON.
    """
    chosen = [ratio for ratio in RATIOS if ratio.section in set(sections)]
    rows = []
    for ratio in chosen:
        recorded, found = (
            find(_read(place / ratio.file), ratio.path) for place in (ROOT / "results", directory)
        )
        rows.append((ratio, recorded, found))
    return rows


def measure(directory: Path, sections: Sequence[str]) -> None:
    """Run the benchmarks of the sections, their JSON into the directory.

    Raises:
        subprocess.CalledProcessError: one failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if of_bench := [section for section in sections if section != "trainer"]:
        _run("run", "--only", ",".join(of_bench), "--out", str(directory / "bench.json"))
    if "trainer" in sections:
        recorded = _read(ROOT / "results/bench-trainer.json")  # each processor has another dtype by itself
        _run("trainer.run", "--dtype", recorded["dtype"], "--out", str(directory / "bench-trainer.json"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each ratio, and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare ratios with the recorded ones.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="A,B")
    parser.add_argument("--found", type=Path, help="directory with the JSON of an earlier call")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.only) - set(SECTIONS)):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    directory = options.found or ROOT / "runs/bench-check"
    print(f"bench-check: load average {os.getloadavg()[0]:.1f}", flush=True)
    if not options.found:
        measure(directory, options.only)
    failed = 0
    for ratio, recorded, found in compare(directory, options.only):
        verdict = "no reference"
        if found is not None:
            worse = worse_by(recorded, found, less_is_better=ratio.less_is_better)
            failed += worse > WORSE
            verdict = "WORSE" if worse > WORSE else "better" if worse < -WORSE else "same"
        print(f"{verdict:12} {recorded:8.3f} -> {found or math.nan:8.3f}  {ratio.path} ({ratio.file})")
    print(f"{failed} more than {WORSE:.0%} worse than recorded")
    return 1 if failed else 0


def _run(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", f"tests.benchmarks.{module}", *words], cwd=ROOT, check=True)


def _read(path: Path) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(path.read_text())
    return loaded


if __name__ == "__main__":
    sys.exit(main())
