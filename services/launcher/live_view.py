"""Renders the state of a run for a terminal: a pure function from a `RunView` to rich's types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.observability.bottleneck import PartTimes
from services.observability.durations import rate_text, seconds_text
from services.observability.printable import printable
from services.observability.service_rows import MISSING, STARTS, WAITS, WORKS, ServiceRow
from services.run_record.progress import number, token_rate
from services.run_record.steps import step_seconds

SHOWN_STEPS = 6
"""Number of newest steps in the table."""
SHOWN_SERVICES = 16
STYLES = {WORKS: "green", WAITS: "yellow", STARTS: "cyan", MISSING: "red"}
COLUMNS: Sequence[tuple[str, str, str]] = (
    ("reward", "reward_mean", ".3f"),
    ("lag", "lag_mean", ".2f"),
    ("max lag", "lag_max", "d"),
    ("tokens", "trained_tokens", "d"),
    ("loss", "loss", ".4f"),
    ("wait s", "wait_s", ".1f"),
    ("train s", "train_s", ".1f"),
)
"""Heading, field of a step's line and format of the table's columns."""


@dataclass(frozen=True, slots=True)
class RunView:
    """State of a run for the terminal view."""

    run: str
    state: str
    """starting, running, draining, done, or halted and why."""
    version: int
    """Number of committed steps."""
    steps: int
    """Number of requested steps."""
    seconds: float
    """Seconds since the start of `tether up`."""
    bound: str = ""
    """Bound, such as "E=1 B=8 mask"."""
    services: tuple[ServiceRow, ...] = ()
    lines: tuple[Mapping[str, Any], ...] = ()
    """Newest lines of metrics.jsonl since this start, oldest first."""
    since_step_s: float = 0.0
    """Seconds since the newest step."""
    warnings: tuple[str, ...] = ()
    """Current problems, one line each."""


def render_view(view: RunView) -> RenderableType:
    """Return the view as lines and tables, about 20 lines high."""
    parts: list[RenderableType] = [_headline(view), _bar(view), _services(view.services)]
    if view.lines:
        parts.append(_steps(view.lines[-SHOWN_STEPS:]))
    if sentence := PartTimes(view.lines).bottleneck():
        parts.append(Text(sentence))
    parts += [Text(f"! {printable(line)}", style="bold yellow") for line in view.warnings]
    return Group(*parts)


def _headline(view: RunView) -> Text:
    style = "red" if view.state.startswith("halted") else "yellow" if view.state == "draining" else "green"
    return Text.assemble(
        (f"{view.run} ", "bold"), (view.state, style), f"  {view.bound}  {seconds_text(view.seconds)}"
    )


def _bar(view: RunView) -> Table:
    each = step_seconds(view.lines, view.since_step_s)
    text = f"{view.version}/{view.steps}"
    if each is not None and view.state == "running":
        text += f"  {rate_text(each, view.steps - view.version)}"
    rate_now = token_rate(view.lines[-1]) if view.lines else None
    text += f"  {rate_now:.0f} tokens/s" if rate_now is not None else ""
    table = Table.grid(padding=(0, 1))
    table.add_row(ProgressBar(total=view.steps, completed=view.version, width=30), Text(text))
    return table


def _services(rows: Sequence[ServiceRow]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in rows[:SHOWN_SERVICES]:
        since = "" if row.seconds is None or row.seconds < 1 else seconds_text(row.seconds)
        restarts = f"{row.restarts} restart{'s' if row.restarts > 1 else ''}" if row.restarts else ""
        table.add_row(
            Text(printable(row.name), "bold"),
            Text(printable(row.text), STYLES[row.state], overflow="ellipsis", no_wrap=True),
            Text(since),
            Text(restarts, "red"),
        )
    if len(rows) > SHOWN_SERVICES:
        table.add_row(Text("..."), Text(f"{len(rows) - SHOWN_SERVICES} more processes"))
    return table


def _steps(lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for heading in ("version", *(heading for heading, _, _ in COLUMNS)):
        table.add_column(heading, justify="right")
    for line in lines:
        cells = [number(line, name, form if name != "lag_max" else "d") for _, name, form in COLUMNS]
        style = "bold yellow" if line.get("skipped") else ""
        table.add_row(str(line["version"]), *cells, style=style)
    return table
