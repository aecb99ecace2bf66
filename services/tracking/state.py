"""Keeps on disk how far a tracker got, for its next start and for the terminal."""

from pathlib import Path

import msgspec

from protocol.host.atomic_file import write_atomically

FOLDER = "tracking"
"""In the run directory; one file and one folder for each kind."""


class TrackingState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one kind: RUN_DIR/tracking/KIND.json."""

    run_id: str = ""
    """Name of the run in the library."""
    url: str = ""
    """Where a person finds it."""
    offsets: dict[str, int] = {}
    """File of the run directory -> bytes of it that were sent."""
    sent: int = 0
    """Points that were sent."""
    version: int = -1
    """Version of the newest step that was sent; -1 before there is one."""
    problem: str = ""
    """Why sending has stopped; empty if it has not."""


def state_file(run_dir: Path, kind: str) -> Path:
    """Return the file of a kind."""
    return run_dir / FOLDER / f"{kind}.json"


def read_state(run_dir: Path, kind: str) -> TrackingState:
    """Return the state of a kind; a new run's state if there is none."""
    try:
        return msgspec.json.decode(state_file(run_dir, kind).read_bytes(), type=TrackingState)
    except (OSError, msgspec.MsgspecError):
        return TrackingState()


def write_state(run_dir: Path, kind: str, state: TrackingState) -> None:
    """Replace the state of a kind. Raises OSError."""
    write_atomically(state_file(run_dir, kind), msgspec.json.encode(state))
