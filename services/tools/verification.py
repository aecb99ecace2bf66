"""Verifies a run from its directory, for `tether verify`: event log, records, calls of sessions, files."""

import dataclasses
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify
from trainer.storage.stored_tokens import count_stored_tokens

MAX_SHOWN = 50
"""Maximum number of violations, and of damaged places, in the text."""


def verify_run(run_dir: Path, *, files: bool = False, numerics: bool = False) -> dict[str, Any]:
    """Check the event log against lifecycle and bound, and stored records against log and journalled calls.

    Args:
        run_dir: directory of the run.
        files: also verify all files with checksums; adds the fields of `CheckedFiles`.
        numerics: also recompute the records; adds the fields of `Numerics`.

    Raises:
        SettingsError: there is no log.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise SettingsError(f"no audit log {path}: give the directory of a run, such as runs/demo")
    facts = dataclasses.asdict(verify(path))
    if files:
        from services.run_record.damage import check_files

        facts |= dataclasses.asdict(check_files(run_dir))
    if numerics:
        from services.audit.offline import STEPS, audit_recorded
        from services.settings.load import run_settings
        from services.tools.recorded.run import RecordedRun

        facts |= audit_recorded(RecordedRun(run_settings(run_dir), range(STEPS))).facts()
    spool = run_dir / "spool.sqlite"
    absent = "" if spool.is_file() else f"there is no file {spool}"
    if absent and not (run_dir / "archive").is_dir():
        return {**facts, "note": f"no records were found to compare: {absent}"}
    from services.run_record.call_audit import audit_calls  # numpy; a log alone needs none

    calls, stored = audit_calls(run_dir), count_stored_tokens(run_dir, path)
    facts["violations"] += calls.violations + stored.violations
    facts |= {"records": stored.records, "record_tokens": stored.tokens}
    if stored.cancelled_samples:
        facts |= {name: getattr(stored, name) for name in ("cancelled_samples", "cancelled_tokens")}
    found: dict[str, Any] = {"calls": calls.calls, "call_tokens": calls.tokens} if calls.calls else {}
    if absent:
        what = "only archived records were compared" if stored.records else "no records were found to compare"
        found["note"] = f"{what}: {absent}"
    return {**facts, **found, **({"tool_results": calls.results} if calls.results else {})}


def render_verification(facts: dict[str, Any]) -> str:
    """Format counters, violations and damaged files."""
    counts = {name: len(value) if isinstance(value, list) else value for name, value in facts.items()}
    not_covered, note = counts.pop("not_covered", 0), counts.pop("note", "")
    return "\n".join(
        (
            "  ".join(f"{name} {value}" for name, value in counts.items()),
            *(f"violation: {violation}" for violation in facts["violations"][:MAX_SHOWN]),
            *(f"alarm: {alarm['sentence']}" for alarm in facts.get("alarms", ())[:MAX_SHOWN]),
            *(f"damaged: {place}" for place in facts.get("damaged", ())[:MAX_SHOWN]),
            *([f"not covered: {', '.join(facts['not_covered'])}"] if not_covered else ()),
            *([f"note: {note}"] if note else ()),
        )
    )
