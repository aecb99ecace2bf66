"""Verifies a run and shows the calls of a group, from its directory: for `tether verify` and `trace`."""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.messages import Call
from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify
from services.observability.printable import printable
from services.run_files.call_audit import audit_calls

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
    facts, calls = dataclasses.asdict(verify(path)), audit_calls(run_dir)
    facts["violations"] += calls.violations
    return {**facts, "calls": calls.calls, "call_tokens": calls.tokens} if calls.calls else facts


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


def render_calls(calls: Sequence[Call]) -> str:
    """Return the journalled calls of a group, a line for each; empty if there are none."""
    return "".join(
        f"{_clock(call.began_ms)}  +{(call.ended_ms - call.began_ms) / 1e3:.3f} s  call     "
        f"sample {call.sample}  number {call.number}  after {call.parent}  attempt {call.attempt}  "
        f"tokens {call.tokens.shape[0]}  versions {_versions(call)}  engine {printable(call.engine)}  "
        f"token {printable(call.token)}\n"
        for call in calls
    )


def _versions(call: Call) -> str:
    return ",".join(str(version) for version in sorted({int(v) for v in call.spans.numpy()[:, 1]}))


def _clock(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1e3, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
