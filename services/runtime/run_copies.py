"""Fetches a run from `run.remote` into an empty run directory, and reports the state of copies.

A run directory determines some settings of the next start, so the settings are composed again after a fetch.
"""

import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from protocol.host.atomic_file import write_atomically
from services.ledger.event_log.archiver import FILE as EVENT_LOG
from services.runtime.frozen_models import FILE as FROZEN_MODELS
from services.settings.hub import FILE as HUB
from services.settings.load import FILE as SETTINGS
from services.settings.load import SPOOL
from services.settings.sections import Settings
from trainer.storage.remote import DamagedCopy, RemoteDirectory, RemoteError

log = logging.getLogger("tether")

CHECKPOINT, RUN = "checkpoint", "run"
"""Directories in a copy."""
STATE = (SETTINGS, "audit.head", EVENT_LOG, "metrics.head", "metrics.jsonl")
"""Files of which every run directory has at least one, in the order of copying: a log's head names one of its
lines, so the head is copied first."""
COPIES = "uploads"
"""Directory in the run directory with a file per destination of copies, and files staged for copying."""
RUN_FILES = (*STATE, HUB, FROZEN_MODELS)
"""Optional files that a run needs in addition to its checkpoint and its spool."""


class CopyState(msgspec.Struct, frozen=True):
    """State of the newest copy to a destination: RUN_DIR/uploads/NAME.json."""

    version: int
    problem: str = ""
    """Why the copy failed; empty if it succeeded."""
    place: str = ""
    """Destination: `run.remote` or `run.hub`."""


def write_copy_state(run_dir: Path, name: str, state: CopyState) -> None:
    """Record the state of the newest copy to the destination `name`. Raises OSError."""
    (run_dir / COPIES).mkdir(exist_ok=True)
    write_atomically(run_dir / COPIES / f"{name}.json", msgspec.json.encode(state))


def read_copy_state(run_dir: Path, name: str) -> CopyState | None:
    """Return the state recorded by `write_copy_state`; None if it cannot be read."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((run_dir / COPIES / f"{name}.json").read_bytes(), type=CopyState)
    return None


def describe_copies(settings: Settings) -> Iterator[str]:
    """Yield a line per destination of copies: the copied version, or why the newest copy failed."""
    run, places = settings.run_dir, {"remote": settings.run.remote, "hub": settings.run.hub}
    for name, place in places.items():
        state = read_copy_state(run, name)
        if state is None or state.place != place:
            continue
        if not state.problem:
            yield f"version {state.version} is at {place}"
            continue
        command = shlex.join(("tether", "push", str(run), place))
        remedy = f"`{command}` sends it" if name == "hub" else f"copy {run} by hand"
        yield f"warning: version {state.version} is not at {place}: {state.problem}; {remedy}"


def copy_lines(source: Path, target: Path) -> None:
    """Copy a file; omit the incomplete last line of a log that other processes append to.

    Raises:
        OSError: the file cannot be copied.
    """
    content = source.read_bytes()
    is_log = source.suffix == ".jsonl"
    target.write_bytes(content[: content.rfind(b"\n") + 1] if is_log else content)


def settings_of_fetched(settings: Settings, compose: Callable[[], Settings]) -> Settings:
    """Fetch the run as `fetch_run`; return its settings, including choices of earlier starts.

    Args:
        settings: settings of the run, composed before the fetch.
        compose: composes the settings again.

    Raises:
        SettingsError: as `fetch_run`, or the settings do not fit the fetched run.
        RemoteError: as `fetch_run`.
    """
    if not (line := fetch_run(settings)):
        return settings
    print(line, file=sys.stderr)
    return compose()


def fetch_run(settings: Settings) -> str:
    """Fetch the newest complete copy if the run directory has no run; return a line for the user, or "".

    Raises:
        SettingsError: the URL in `run.remote` cannot be used.
        RemoteError: the copies cannot be read, or all of them are damaged; the message names them.
    """
    if not settings.run.remote:
        return ""
    remote = RemoteDirectory(settings.run.remote)
    run_dir = settings.run_dir
    marker = run_dir / "fetching"  # exists until the fetch is complete: an interrupted fetch is repeated
    if not marker.exists() and any((run_dir / name).exists() for name in (*STATE, SPOOL, "checkpoints")):
        return ""
    versions = remote.versions()
    if not versions:
        return ""
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    marker.touch()
    version = _download_newest(remote, versions, run_dir)
    write_copy_state(run_dir, "remote", CopyState(version, place=remote.url))
    marker.unlink()
    return f"fetched version {version} of the run from {settings.run.remote}"


def _download_newest(remote: RemoteDirectory, versions: Sequence[int], run_dir: Path) -> int:
    """Download the newest of ascending versions that has a complete copy, and return the version."""
    left_out: list[str] = []
    for version in reversed(versions):
        checkpoint = run_dir / "checkpoints" / f"step_{version:08d}"
        try:
            remote.download(version, {CHECKPOINT: checkpoint, RUN: run_dir})
        except DamagedCopy as error:
            log.warning("remote.left_out version=%d error=%s", version, error)
            shutil.rmtree(checkpoint, ignore_errors=True)  # of a fetch that was interrupted during its move
            left_out.append(f"version {version}: {error}")
        else:
            return version
    raise RemoteError(f"{remote.url} has no whole copy: {'; '.join(left_out)}")
