"""Stores the progress of a tracker on disk, for its next start and for the terminal."""

from pathlib import Path

import msgspec

from protocol.host.atomic_file import write_atomically

FOLDER = "tracking"
"""Directory in the run directory with a file and a directory per kind."""


class TrackingState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one kind: RUN_DIR/tracking/KIND.json."""

    run_id: str = ""
    """Id of the run in the library."""
    url: str = ""
    """Location of the run for users."""
    offsets: dict[str, int] = {}
    """File in the run directory -> number of bytes sent."""
    sent: int = 0
    """Number of sent points."""
    version: int = -1
    """Version of the newest sent step; -1 before the first."""
    problem: str = ""
    """Why sending failed; empty if it works."""


def state_file(run_dir: Path, kind: str) -> Path:
    """Return the state file of a kind."""
    return run_dir / FOLDER / f"{kind}.json"


def read_state(run_dir: Path, kind: str) -> TrackingState:
    """Return the state of a kind; a new state without a file."""
    try:
        return msgspec.json.decode(state_file(run_dir, kind).read_bytes(), type=TrackingState)
    except (OSError, msgspec.MsgspecError):
        return TrackingState()


def write_state(run_dir: Path, kind: str, state: TrackingState) -> None:
    """Replace the state of a kind. Raises OSError."""
    write_atomically(state_file(run_dir, kind), msgspec.json.encode(state))
