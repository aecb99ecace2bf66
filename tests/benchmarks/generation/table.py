"""The table that `make bench-generation` prints, in Markdown, from the JSON that it writes.

python -m tests.benchmarks.generation.table runs/bench-generation.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.generation.session import COMMITTING, LOGPROBS

BARE = {
    "vllm": "vllm-bare",
    "sglang": "sglang-bare",
    "megatron": "vllm-bare",
    "megatron-graphs": "vllm-bare",
}
"""Way of the project's engine -> the bare one that it is compared with."""
AIMS = {"": 0.97, COMMITTING: 0.95}
"""Kind of load -> least tokens/s of the project's engine over the bare engine's; `megatron` has no aim."""


def rates_of(facts: Mapping[str, Any], way: str) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Return (kind of load, requests at a time) -> the rates of a way, round by round."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for rate in facts["ways"].get(way, ()):
        found.setdefault((rate["kind"], rate["running"]), []).append(rate)
    return found


def speed_of(rates: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median of the rounds' tokens/s; None without any."""
    return median(rate["tokens_per_s"] for rate in rates) if rates else None


def ratios_of(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each load of the project's engines: medians of the rounds.

    A round's ratio is over the bare engine's rate in that round, without log-probabilities.
    """
    rows = []
    for engine, way in BARE.items():
        bare = rates_of(facts, way)
        for (kind, running), rates in rates_of(facts, engine).items():
            references = bare.get(("", running), [])
            ratios = [
                rate["tokens_per_s"] / reference["tokens_per_s"]
                for rate, reference in zip(rates, references, strict=False)
            ]
            ratio = median(ratios) if ratios else None
            aim = None if engine.startswith("megatron") else AIMS[kind]
            paused_ms = [pause for rate in rates for pause in rate.get("paused_ms", ())]
            rows.append(
                {
                    "engine": engine,
                    "kind": kind,
                    "running": running,
                    "tokens_per_s": speed_of(rates),
                    "bare": speed_of(references),
                    "ratio": ratio,
                    "ratios": ratios,
                    "aim": aim,
                    "reached": None if ratio is None or aim is None else ratio >= aim,
                    "commits": len(paused_ms),
                    "paused_ms": median(paused_ms) if paused_ms else None,
                }
            )
    return rows


def render(facts: Mapping[str, Any]) -> str:
    """Versions and hardware, ratios, and what failed."""
    lines = [f"Generation, model {facts['model']}: {facts['machine']} {facts['versions']}", ""]
    lines += [
        "| engine | at a time | tokens/s | bare | ratio | aim | commits | a commit, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ratios_of(facts):
        name = f"{row['engine']}, {row['kind']}" if row["kind"] else row["engine"]
        cells = [name, row["running"], *(number(row[key]) for key in ("tokens_per_s", "bare"))]
        cells += [
            number(row["ratio"], 3),
            row["aim"] or "",
            row["commits"] or "",
            number(row["paused_ms"], 1),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for way in dict.fromkeys(BARE.values()):
        for (kind, running), rates in rates_of(facts, way).items():
            if kind == LOGPROBS:
                found = number(speed_of(rates))
                lines += ["", f"{way} with its own {LOGPROBS}, {running} at a time: {found} tokens/s"]
    lines += ["", *(f"failed: {way}: {why}" for way, why in facts["failed"].items())]
    return "\n".join(lines).rstrip()


def number(value: float | None, digits: int = 0) -> str:
    """Return a number as the table has it; empty: there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a file."""
    (path,) = arguments or sys.argv[1:]
    print(render(json.loads(Path(path).read_text())))


if __name__ == "__main__":
    main()
