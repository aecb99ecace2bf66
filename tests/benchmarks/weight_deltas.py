"""Measures which share of a version's bytes changes, by learning rate, in runs of the demo with AdamW.

    python -m tests.benchmarks.weight_deltas [--steps 24] [--dtype bfloat16] [--rates 1e-6 1e-5 1e-4 1.5e-3]

Each rate is a run of `tether up` with `weights.delta`: the engine serves every version out of its changes,
whose digests it checks. The shares are those of the coded changes, as they were written and read.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainer.weights.version_directories import read_manifests

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
HEADER = "| learning rate | versions | median share of bytes | least | most |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of bytes of the versions of one run."""

    rate: str
    found: Sequence[float]
    """By version, without the anchor."""

    def row(self) -> str:
        """Return the row of the table."""
        cells = (f"{100 * number:.2f} %" for number in (median(self.found), min(self.found), max(self.found)))
        return f"| {self.rate} | {len(self.found)} | {' | '.join(cells)} |"


def measured(rate: str, steps: int, dtype: str) -> Shares:
    """Run the demo with a learning rate."""
    with tempfile.TemporaryDirectory(prefix="tether-deltas-") as directory:
        settings = {
            "run.dir": directory,
            "run.steps": steps,
            "engine.name": "hf",
            "engine.dtype": dtype,
            "optimizer.lr": rate,
            "eval.at_end": "false",
            "weights.transport": "disk",
            "weights.delta": "true",
            "weights.anchor_every": steps + 1,
            "weights.keep": steps + 1,
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "services.cli", "up", str(ROOT / "deploy/configs/demo.toml"), *words]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        if ended.returncode:
            raise SystemExit(
                f"{' '.join(command)} ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}"
            )
        manifests = sorted(read_manifests(Path(directory) / "weights"), key=lambda one: one.version)
    whole = sum(manifests[0].buckets)
    return Shares(rate, [one.chain[-1].nbytes / whole for one in manifests if len(one.chain) > 1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rates", nargs="+", default=["1e-6", "1e-5", "1e-4", "1.5e-3"])
    given = parser.parse_args()
    print(HEADER)
    for rate in given.rates:
        print(measured(rate, given.steps, given.dtype).row(), flush=True)


if __name__ == "__main__":
    main()
