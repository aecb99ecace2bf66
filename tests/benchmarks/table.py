"""A figure of the benchmark: a median over alternating runs, against the median of its reference in the same
run."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Run = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table; `ratio` is value / reference, and `aim` is what the ratio (without a reference,
    the value) should reach."""

    value: float
    reference: float | None
    ratio: float | None
    unit: str
    aim: float | None
    runs: Sequence[Run]
    """What each alternation measured."""

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached; None if there is none."""
        got = self.value if self.ratio is None else self.ratio
        return None if self.aim is None else got >= self.aim

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figure(
    runs: Sequence[Run], value: str, *, unit: str, reference: str | None = None, aim: float | None = None
) -> Figure:
    """The medians of two fields of `runs`. Runs without the reference field make a figure without a
    reference."""
    ours = statistics.median(run[value] for run in runs)
    others = [run[reference] for run in runs if reference in run] if reference is not None else []
    theirs = statistics.median(others) if others else None
    ratio = ours / theirs if theirs else None
    return Figure(
        _rounded(ours),
        _rounded(theirs),
        _rounded(ratio),
        unit,
        aim,
        [{k: _rounded(v) for k, v in run.items()} for run in runs],
    )


def render(figures: Mapping[str, Figure]) -> str:
    """The table that `make bench` prints."""
    rows = [("figure", "value", "reference", "ratio", "aim", "unit", "runs")]
    for name, row in figures.items():
        aim = "" if row.aim is None else f"{row.aim:g} {'reached' if row.reached else 'MISSED'}"
        rows.append(
            (
                name,
                _text(row.value),
                _text(row.reference),
                _text(row.ratio),
                aim,
                row.unit,
                str(len(row.runs)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rounded(number: Any) -> Any:
    return float(f"{number:.4g}") if isinstance(number, float) else number


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
