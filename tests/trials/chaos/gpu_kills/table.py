"""Prints what was found as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = {
    "killed": lambda row: row["target"],
    "at": lambda row: row["moment"],
    "version was": lambda row: row.get("in_flight", ""),
    "groups in flight": lambda row: str(row.get("groups_in_flight", "")),
    "process s": lambda row: _number(row.get("process_s")),
    "serving s": lambda row: _number(row.get("served_s")),
    "next step s": lambda row: _number(row.get("step_s")),
    "all work s": lambda row: _number(row.get("working_s")),
    "what became of it": lambda row: row.get("problem") or row.get("not_run") or row.get("fate", ""),
}


def table(layouts: Sequence[Mapping[str, Any]]) -> str:
    """Return one row for each kill."""
    lines = ["| layout | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for found in layouts:
        for row in found["kills"]:
            cells = [column(row) for column in COLUMNS.values()]
            lines.append("| " + " | ".join([found["layout"], *cells]) + " |")
    return "\n".join(lines)


def last_line(layouts: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary: kills, those in the middle of a transfer, and violations."""
    rows = [row for found in layouts for row in found["kills"] if "not_run" not in row]
    hit = sum(row.get("in_flight", "served already") != "served already" for row in rows)
    wrong = sum(len(found["violations"]) for found in layouts)
    steps, trained = (sum(found.get(name, 0) for found in layouts) for name in ("steps", "trained"))
    return f"kills={len(rows)} in-flight={hit} steps={steps} trained={trained} violations={wrong}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
