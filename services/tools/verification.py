"""Verifies a run from its directory, for `tether verify`: the event log, and the calls of sessions."""

import dataclasses
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify

MAX_SHOWN = 50
"""Violations in the text."""


def verify_run(run_dir: Path) -> dict[str, Any]:
    """Check the event log against lifecycle and bound, and the journalled calls against the records.

    Raises:
        SettingsError: there is no log.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise SettingsError(f"no audit log {path}: give the directory of a run, such as runs/demo")
    facts = dataclasses.asdict(verify(path))
    if not (run_dir / "spool.sqlite").is_file() and not (run_dir / "archive").is_dir():
        return facts
    from services.run_record.call_audit import audit_calls  # numpy; a log alone needs none

    calls = audit_calls(run_dir)
    facts["violations"] += calls.violations
    found = {"calls": calls.calls, "call_tokens": calls.tokens} if calls.calls else {}
    return {**facts, **found, **({"tool_results": calls.results} if calls.results else {})}


def render_verification(facts: dict[str, Any]) -> str:
    """Return counters and violations as text."""
    violations = facts["violations"]
    counts = {**facts, "violations": len(violations)}
    return "\n".join(
        (
            "  ".join(f"{key} {value}" for key, value in counts.items()),
            *(f"violation: {violation}" for violation in violations[:MAX_SHOWN]),
        )
    )
