"""Reports problems and progress of the tracking processes on the terminal."""

import asyncio
import shlex
from collections.abc import Callable, Iterator

from services.settings.sections import Settings
from services.tracking.state import read_state

POLL_S = 1.0
"""Seconds between two reads of the tracking states."""


async def warn_loop(settings: Settings, note: Callable[[str], None]) -> None:
    """Print each new problem of a tracker once, until cancelled."""
    problems: dict[str, str] = {}
    while True:
        for kind in settings.tracking.kind:
            problem = read_state(settings.run_dir, kind).problem
            if problem and problems.get(kind) != problem:
                note(f"warning: tracking by {kind} failed and is tried again; the run continues: {problem}")
            problems[kind] = problem
        await asyncio.sleep(POLL_S)


def describe_tracking(settings: Settings) -> Iterator[str]:
    """Yield a line per tracker: its progress, and the URL of the run.

    Call after the tracking processes have ended.
    """
    newest = settings.run_dir / "metrics.jsonl"
    size = newest.stat().st_size if newest.is_file() else 0
    for kind in settings.tracking.kind:
        state = read_state(settings.run_dir, kind)
        if state.offsets.get(newest.name, 0) >= size and not state.problem:
            yield f"tracking by {kind}: all {state.sent} points were sent; {state.url}"
        else:
            cause = state.problem or "remaining points were not sent in time"
            yield (
                f"warning: tracking by {kind} got {state.sent} points, up to version {state.version} "
                f"({cause}); `tether track {shlex.quote(str(settings.run_dir))}` sends the rest"
            )
