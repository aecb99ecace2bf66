"""Waits at the end of a run for the scores of its last versions, and reports unscored versions."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from services.launcher.child import SupervisedProcess
from services.run_record.evaluations import (
    SKIP_MARK,
    SNAPSHOTS,
    due_versions,
    read_evaluations,
    unscored_versions,
)
from services.settings.sections import Settings
from trainer.weights.version_directories import VERSION_NAME

POLL_S = 0.2
MAX_SHOWN_VERSIONS = 10
"""Maximum number of versions named in a line."""


async def finish_evaluation(
    settings: Settings,
    evaluation: SupervisedProcess | None,
    stop: asyncio.Event,
    note: Callable[[str], None],
) -> None:
    """Wait until all snapshots are scored, at most `eval.finish_s` seconds.

    Args:
        settings: settings of the run.
        evaluation: evaluation process; None returns at once.
        stop: ends the wait when set; so does the end of the evaluation process.
        note: prints a line.
    """
    versions = waiting_versions(settings.run_dir)
    if evaluation is None or not versions or stop.is_set() or evaluation.finished.is_set():
        return
    limit_s = settings.eval.finish_s
    note(f"the run is done; up to {limit_s:g} s for the evaluation of {describe_versions(versions)}")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while waiting_versions(settings.run_dir):
                if stop.is_set() or evaluation.finished.is_set():
                    return
                await asyncio.sleep(POLL_S)


def waiting_versions(run_dir: Path) -> list[int]:
    """Return the versions with a snapshot that is neither completely scored nor skipped."""
    paths = [path for path in (run_dir / SNAPSHOTS).glob("v*") if not (path / SKIP_MARK).exists()]
    return sorted({int(found[1]) for path in paths if (found := VERSION_NAME.fullmatch(path.name))})


def describe_unscored(settings: Settings, first: int, last: int, evaluation: SupervisedProcess | None) -> str:
    """Return a line that names the due versions without scores; empty if all are scored.

    Args:
        settings: settings of the run.
        first: version at which this `tether up` started.
        last: version at which it ended.
        evaluation: evaluation process; None if evaluation is off.
    """
    if evaluation is None:
        return ""
    due = due_versions(settings.eval.every, first, last)
    unscored = unscored_versions(list(read_evaluations(settings.run_dir)), due)
    if not unscored:
        return ""
    reason = evaluation.failure_reason
    cause = f"; {reason}" if reason else " (not in time, see docs/evaluation.md)"
    return (
        f"evaluation: {len(due) - len(unscored)} of {len(due)} versions were scored, "
        f"not {describe_versions(unscored)}{cause}"
    )


def describe_versions(versions: list[int]) -> str:
    """Return "version 2" or "versions 2, 4 and 7 more"."""
    shown = ", ".join(map(str, versions[:MAX_SHOWN_VERSIONS]))
    more = f" and {len(versions) - MAX_SHOWN_VERSIONS} more" if len(versions) > MAX_SHOWN_VERSIONS else ""
    return f"version{'s' if len(versions) > 1 else ''} {shown}{more}"
