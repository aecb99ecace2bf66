"""Describes a run from its directory alone: its state, and how and when it ended."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from protocol.errors import SettingsError, TetherError, innermost
from protocol.host.atomic_file import write_atomically
from protocol.host.file_lock import try_lock
from protocol.host.full_disk import describe_full, is_disk_full_error, is_full
from services.ledger.event_log.archiver import FILE as EVENTS
from services.run_record.evaluations import FILE as EVALUATIONS
from services.run_record.halts import explain_halt
from services.run_record.steps import FILE as STEPS
from services.run_record.steps import MAX_TIME, read_last, step_facts
from services.run_record.tail import EventTail
from services.settings.sections import Settings

FILE = "ended.json"
PARENT = "parent.json"
LOCK = "lock"
"""Lock file in the run directory, locked by a running `tether up`."""
RESULTS = (EVENTS, STEPS, EVALUATIONS, "progress.png", "checkpoints", "exports", "logs")
"""Files and directories of a run directory that are shown to the user."""


class RunEnd(msgspec.Struct, frozen=True):
    """End of the last `tether up` in a run directory."""

    time: Annotated[float, msgspec.Meta(ge=0, lt=MAX_TIME)]
    """Unix time, seconds."""
    error: str = ""
    """Error that ended the run; empty if the run was done, drained or interrupted."""


@contextlib.contextmanager
def recording_end(
    run_dir: Path, was_full: Callable[[], bool] = lambda: False, is_on: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Record when the block ends, and its error. The record is removed while the block runs.

    If settings are refused before the run is on, the previous record is restored.

    Args:
        run_dir: directory of the run.
        was_full: returns whether the disk was full at its last check.
        is_on: returns whether the run was created or resumed.

    Raises:
        SettingsError: the block failed while the disk is or was full. The original error may only say that
            the ledger's server, which writes to this disk and frees its space at exit, does not answer.
    """
    path = run_dir / FILE
    before = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    error, previous = "", b""
    try:
        yield
    except Exception as failure:
        cause = innermost(failure)
        error = str(cause) if isinstance(cause, TetherError) else f"{type(cause).__name__}: {cause}"
        if was_full() or is_full(run_dir):
            error = f"{_full_disk_error(run_dir)} ({error})"
            raise SettingsError(error) from failure
        previous = before if isinstance(cause, SettingsError) and not is_on() else b""
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide the error of the run
            write_atomically(path, previous or msgspec.json.encode(RunEnd(time.time(), error)))


@contextlib.contextmanager
def explaining_full_disk(run_dir: Path) -> Iterator[None]:
    """Raise a clear error if the block lacks disk space for the files of a run.

    Raises:
        SettingsError: the disk is full.
    """
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        if is_disk_full_error(error):
            raise SettingsError(f"{_full_disk_error(run_dir)} ({error})") from error
        raise


class Parent(msgspec.Struct, frozen=True):
    """The run from whose record another run was made, see `services.tools.recorded.rerun`."""

    run_dir: str
    version: int
    """Last version that was repeated."""
    settings: tuple[str, ...] = ()
    """Changed settings of the later steps, for a fork."""

    def sentence(self) -> str:
        """Return a sentence about the run's origin."""
        if self.settings:
            return f"fork of {self.run_dir} from version {self.version} on, with {', '.join(self.settings)}"
        return f"{self.run_dir} made again, up to version {self.version}"


def read_parent(run_dir: Path) -> Parent | None:
    """Return the parent of a run that was made from another run's record; None for other runs."""
    try:
        return msgspec.json.decode((run_dir / PARENT).read_bytes(), type=Parent)
    except (OSError, msgspec.MsgspecError):
        return None


def refuse_made_from_record(run_dir: Path) -> None:
    """Raise SettingsError for a run made from another run's record: it has no ledger to continue."""
    if (parent := read_parent(run_dir)) is not None:
        raise SettingsError(f"{run_dir} cannot be continued: it is {parent.sentence()}")


def read_end(run_dir: Path) -> RunEnd | None:
    """Return how the last `tether up` ended; None if it is running, was killed, or never started."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None


def is_up(run_dir: Path) -> bool:
    """Return whether a `tether up` is running in the directory."""
    try:
        with (run_dir / LOCK).open() as file:
            return not try_lock(file.fileno(), exclusive=False)
    except FileNotFoundError:
        return False


def recorded_state(settings: Settings, last: Mapping[str, Any], tail: EventTail) -> dict[str, Any]:
    """Return the state of a run from its files, with the fields of `LiveState.collect` but no processes.

    `last` is the newest line of metrics.jsonl.
    """
    logged = tail.state()
    version = max(int(last.get("version", 0)), logged["version"])
    steps = logged.get("steps", settings.run.steps)
    halted = logged["halted"]
    bound = logged["bound"] or {
        "max_staleness": settings.bound.max_staleness,
        "groups_per_step": settings.bound.groups_per_step,
        "policy": str(settings.bound.staleness_policy),
    }
    return {
        "run": settings.run.name,
        "source": "files",
        "run_state": "done" if version >= steps else f"halted: {halted}" if halted else "not running",
        "version": version,
        "steps": steps,
        "epoch": logged["epoch"] or last.get("epoch", ""),
        "bound": bound,
        "pending_bound": None,
        "issued": logged.get("issued"),
        "trained": logged.get("trained"),
        "dropped": logged.get("dropped"),
        "active": logged.get("active"),
        "wasted_tokens": None,
        "groups": {},
        "dropped_by_reason": logged["dropped_by_reason"],
        "wasted_by_reason": logged["wasted_by_reason"],
        "drops_since_event": logged["drops_since_event"],
        "processes": [],
        "engines": [],
    }


def describe_ended_run(settings: Settings) -> dict[str, Any]:
    """Return the end of a run from its files, with the fields of `collect_status` and additional ones.

    Returns:
        Additional fields: `why` (what ended the run, one line), `ended` (Unix seconds, or None), `last_step`
            (its line in metrics.jsonl, or None), `results` (names in the run directory).
    """
    tail = EventTail(settings.run_dir).read_all()
    logged, last = tail.state(), read_last(settings.run_dir / STEPS)
    facts = {**recorded_state(settings, last, tail), "run_dir": str(settings.run_dir)}
    end = read_end(settings.run_dir)
    state, why = _end_reason(facts, logged, end.error if end else "")
    parent = read_parent(settings.run_dir)
    newest_ms = max(int(logged.get("time_ms", 0)), int(last.get("time", 0) * 1000))
    halted_ms = int(logged.get("halted_ms", 0)) if logged["halted"] else 0
    return {
        **facts,
        **step_facts(settings.run_dir, is_over=True),
        "run_state": state,
        "why": parent.sentence() if parent else why,
        "ended": end.time if end and not halted_ms else (halted_ms or newest_ms) / 1000 or None,
        "last_step": dict(last) or None,
        "results": [name for name in RESULTS if (settings.run_dir / name).exists()],
    }


def _full_disk_error(run_dir: Path) -> str:
    return f"{describe_full(run_dir)}: make room, then start the same command again"


def _end_reason(facts: Mapping[str, Any], logged: Mapping[str, Any], error: str) -> tuple[str, str]:
    """Return the state of an ended run, and why it ended."""
    version, steps = facts["version"], facts["steps"]
    if version >= steps:
        return "done", f"all {steps} steps were made"
    if logged["halted"]:
        return f"halted: {logged['halted']}", explain_halt(logged["halted"], logged["drop_details"])
    if logged["draining"]:
        prompts = logged.get("prompts", -1)
        if 0 <= prompts <= (logged.get("issued") or 0):
            return "drained", f"its {prompts} prompts ran out"
        return "drained", "it was drained"
    if error:
        return "failed", error
    if is_full(Path(facts["run_dir"])):  # a full disk prevented the record of the error
        return "failed", _full_disk_error(Path(facts["run_dir"]))
    return "stopped", "it was interrupted; the same `tether up` continues from the last step"
