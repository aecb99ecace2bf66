"""`make bench-gpu`, second part: a step of ours beside plain Hugging Face, on the same samples, in one run.

    python -m tests.benchmarks.gpu_trainer.run --out runs/bench-trainer-gpu.json [--sizes 0.5b,1.5b]

Ways alternate: ours comes first and last, and the better of both counts, as for each of the others. Each runs
in a process of its own. One that fails is reported, and the others continue.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record_now

ORDER = ("ours", "hf-compiled", "hf-packed", "hf-padded", "ours", "hf-compiled")
LIMIT_S = 240.0
"""For one way at one size."""


def main() -> int:
    """Run all ways, write the results and print a table; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", default="0.5b,1.5b")
    parser.add_argument("--ways", default=",".join(ORDER))
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "bench-models")
    parser.add_argument("--rest", default="", help="further arguments of every measurement")
    options = parser.parse_args()
    record = record_now()
    results: list[dict[str, Any]] = []
    failed = False
    for size in options.sizes.split(","):
        for way in options.ways.split(","):
            found = _measure(way, size, options.models, options.rest.split())
            failed |= found is None
            if found is not None:
                results.append(found)
                print(_line(found), flush=True)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps({"record": record, "rows": results}, indent=1))
    _print_ratios(results)
    return int(failed)


def _measure(way: str, size: str, models: Path, rest: list[str]) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu_trainer.measure", way, size]
    try:
        done = subprocess.run(
            [*command, "--models", str(models), *rest],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        print(f"{way} {size}: not done after {LIMIT_S:.0f} s", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"{way} {size}: failed\n{error.stderr[-3000:]}", flush=True)
    return None


def _line(found: dict[str, Any]) -> str:
    ours = (
        f", log-probabilities {found['logprobs_over_step']:.2f} of a step"
        if "logprobs_over_step" in found
        else ""
    )
    return (
        f"{found['size']:5} {found['way']:11} {found['step_s']:7.3f} s  {found['tokens_per_s']:7.0f} tok/s  "
        f"MFU {found['mfu']:5.1%}  peak {found['peak_gib']:5.1f} GiB{ours}"
    )


def _print_ratios(results: list[dict[str, Any]]) -> None:
    best: dict[tuple[str, str], float] = {}
    for found in results:
        key = (found["size"], found["way"])
        best[key] = max(best.get(key, 0.0), found["tokens_per_s"])
    for (size, way), speed in best.items():
        if way != "ours" and (size, "ours") in best:
            print(f"{size}: ours is {best[size, 'ours'] / speed:.2f} x {way}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
