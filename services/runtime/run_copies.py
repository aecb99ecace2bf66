"""Fetches a run whose directory is empty from `run.remote`."""

from pathlib import Path

from services.ledger.event_log.archiver import FILE as EVENT_LOG
from services.ledger.event_log.hash_chain import HEAD
from services.settings.load import FILE as SETTINGS
from services.settings.sections import Settings
from trainer.storage.remote import RemoteDirectory

CHECKPOINT, RUN = "checkpoint", "run"
"""Directories of a copy."""
SPOOL = "spool.sqlite"
RUN_FILES = (SETTINGS, HEAD, EVENT_LOG, "metrics.jsonl")
"""What a run needs beside its checkpoint and its spool, in the order in which it is copied: the head of the
event log names one of the log's lines."""


def copy_lines(source: Path, target: Path) -> None:
    """Copy a file that others write lines to, without a line that is half written.

    Raises:
        OSError: it cannot be copied.
    """
    content = source.read_bytes()
    is_log = source.suffix == ".jsonl"
    target.write_bytes(content[: content.rfind(b"\n") + 1] if is_log else content)


def fetch_run(settings: Settings) -> str:
    """Fetch the newest complete copy if the run directory has no run; returns a line for the user, or "".

    Raises:
        SettingsError: `run.remote` is no URL that can be used.
        RemoteError: it cannot be read, or the copy is damaged.
    """
    if not settings.run.remote:
        return ""
    remote = RemoteDirectory(settings.run.remote)
    run_dir = settings.run_dir
    begun = run_dir / "fetching"  # there until everything is: a fetch that was cut off is made again
    if not begun.exists() and any((run_dir / name).exists() for name in (*RUN_FILES, SPOOL, "checkpoints")):
        return ""
    versions = remote.versions()
    if not versions:
        return ""
    version = versions[-1]
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    begun.touch()
    remote.download(version, {CHECKPOINT: checkpoints / f"step_{version:08d}", RUN: run_dir})
    begun.unlink()
    return f"fetched version {version} of the run from {settings.run.remote}"
