"""Films a run whose processes are killed: terminal text as an animated SVG.

    python -m tests.benchmarks.faults.film [--every 6] [--seed 0]    runs the demo, writes both files
    python -m tests.benchmarks.faults.film --draw                    draws again from results/film.json

The demo runs to its end; from its start on a random process gets `kill -9` every few seconds. The record
(results/film.json) has times, rewards, kills and what `tether verify` said; the drawing (results/film.svg) is
made of it alone. Lines appear as in the run, faster by one factor.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps
from tests.benchmarks.faults.kills import kill_one
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT
from tests.integration.command import audit, tether_up, until

RECORD, DRAWING = ROOT / "results/film.json", ROOT / "results/film.svg"
LENGTH_S = 24.0
"""Seconds that the film takes."""
ROWS, LINE_PX, WIDTH_PX, LEFT_PX = 18, 19, 760, 16
BAR = 30
"""Cells of a full reward."""
COLOURS = {"command": "#8be9fd", "step": "#c8d3e0", "kill": "#ff7b72", "end": "#7ee787"}
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the terminal: seconds since the run began, a kind of `COLOURS`, and its text."""

    at: float
    kind: str
    text: str


def main() -> None:
    """Run and draw, or draw alone."""
    parser = argparse.ArgumentParser(description="Film a run under kills.")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="draw from the record, run nothing")
    options = parser.parse_args()
    if not options.draw:
        RECORD.write_text(json.dumps(film(options.every, options.seed), indent=1) + "\n")
    DRAWING.write_text(draw(lines(json.loads(RECORD.read_text()))))


def film(every_s: float, seed: int) -> dict[str, Any]:
    """Run the demo to its end under kills, and return its record."""
    record, rng, kills = record_now(), random.Random(seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="tether-film-", ignore_cleanup_errors=True) as directory:
        run_dir, output = Path(directory) / "run", Path(directory) / "up.log"
        began = time.time()
        words = ("deploy/configs/demo.toml", "--run-dir", str(run_dir), "--set", "services.rollouts=2")
        with tether_up(*words, output=output) as up:
            metrics = run_dir / "metrics.jsonl"
            until((run_dir / "ledger/endpoint.json").exists, seconds=LIMIT_S, what="the ledger's start")
            while up.poll() is None and time.time() - began < LIMIT_S:
                time.sleep(every_s)
                if up.poll() is None and len(read_steps(metrics)) < 58:
                    kills.append(
                        {"at": round(time.time() - began, 2), "name": kill_one(up.pid, run_dir, rng)}
                    )
            code = up.wait(60)
        verified = audit(run_dir)
        steps = [
            {
                "at": round(step["time"] - began, 2),
                "step": step["step"],
                "reward": round(step["reward_mean"], 3),
            }
            for step in read_steps(metrics)
        ]
    ended = {"code": code, "violations": len(verified["violations"]), "trained": verified["trained"]}
    return {"record": record, "seed": seed, "every_s": every_s, "steps": steps, "kills": kills, **ended}


def lines(record: Mapping[str, Any]) -> list[Line]:
    """Return the lines of a film: the command, every second step, each kill, and the end."""
    steps = [step for step in record["steps"] if step["step"] % 2 or step is record["steps"][-1]]
    found = [Line(step["at"], "step", _step(step)) for step in steps]
    found += [Line(kill["at"], "kill", f"        kill -9 {kill['name']}") for kill in record["kills"]]
    found.sort(key=lambda line: line.at)
    last = max(line.at for line in found)
    violations, kills = record["violations"], len(record["kills"])
    verdict = f"{record['trained']} groups trained once each, {kills} kills, {violations} violations"
    return [
        Line(found[0].at - 1, "command", "$ tether up deploy/configs/demo.toml"),
        *found,
        Line(last + 2, "command", "$ tether verify runs/demo"),
        Line(last + 4, "end", verdict),
    ]


def draw(shown: Sequence[Line]) -> str:
    """Return the film as an SVG: each line appears at its time, and the page scrolls when it is full."""
    first, last = shown[0].at, shown[-1].at
    scale = LENGTH_S / (last - first)
    times = [round((line.at - first) * scale, 2) for line in shown]
    text = "\n".join(
        f'<text x="{LEFT_PX}" y="{LINE_PX * (row + 1)}" fill="{COLOURS[line.kind]}" '
        f'style="animation-delay:{at}s">{escape(line.text)}</text>'
        for row, (line, at) in enumerate(zip(shown, times, strict=True))
    )
    scrolls = max(0, len(shown) - ROWS)
    frames = "".join(
        f"{100 * times[ROWS + index] / LENGTH_S:.2f}%{{transform:translateY(-{LINE_PX * (index + 1)}px)}}"
        for index in range(scrolls)
    )
    height = LINE_PX * ROWS + 14
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" role="img" \
aria-label="{escape(shown[-1].text)}">
<style>
text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;\
animation:appear .01s both}}
g{{animation:scroll {LENGTH_S:g}s step-end both}}
@keyframes appear{{from{{opacity:0}}}}
@keyframes scroll{{0%{{transform:none}}{frames}}}
@media (prefers-reduced-motion:reduce){{text{{animation:none}}\
g{{animation:none;transform:translateY(-{LINE_PX * scrolls}px)}}}}
</style>
<rect width="{WIDTH_PX}" height="{height}" rx="8" fill="#10161d"/>
<g>
{text}
</g>
</svg>
"""


def _step(step: Mapping[str, Any]) -> str:
    cells = round(BAR * step["reward"])
    return f"step {step['step']:3}  reward {step['reward']:.2f}  {'█' * cells}{'·' * (BAR - cells)}"


if __name__ == "__main__":
    main()
