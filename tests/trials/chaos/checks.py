"""Checks what must hold after a run under chaos. Each function returns violations, one sentence each."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from services.ledger.interface import LedgerStatus
from services.run_record.steps import read_steps
from tests.integration.command import audit

LEFT_BY_A_CLEAN_RUN = re.compile(
    r"settings\.json|ended\.json|lock|spool\.sqlite|(audit|metrics)\.(jsonl|head)|progress\.png"
    r"|logs/(spare\.)?(ingest|trainer|monitor|(rollout|reward)\.\d)\.log|model/[a-z_]+\.(json|safetensors)"
    r"|archive/step_\d{8}\.msgpack|checkpoints/step_\d{8}/((manifest|layout)\.json|rank[_-]\d{5}\.safetensors)|exports/step_\d{8}/[a-z_]+\.(json|safetensors|jinja)"
)


@dataclass
class Report:
    """State that a run left behind."""

    steps: int = 0
    groups: int = 0
    trained: int = 0
    dropped: int = 0
    active: int = 0
    violations: list[str] = field(default_factory=list)


def check_run(run_dir: Path, status: LedgerStatus) -> Report:
    """Check steps, event log and counts of a run.

    All steps were made, the log is sound, its counts are the ledger's, nothing was trained twice and no group
    vanished.
    """
    result = audit(run_dir)
    report = Report(result["steps"], result["issued"], result["trained"], result["dropped"], result["active"])
    wrong = report.violations
    wrong += [f"tether verify: {violation}" for violation in result["violations"]]
    if not status.done:
        wrong.append(f"the ledger stands at version {status.version} of {status.steps}")
    if report.steps != status.steps or report.trained != status.steps * status.bound.groups_per_step:
        wrong.append(
            f"{status.steps} steps of {status.bound.groups_per_step} groups, but {report.steps} and "
            f"{report.trained} are in the log"
        )
    found = (status.issued, status.trained, status.dropped, status.active)
    if found != (report.groups, report.trained, report.dropped, report.active) or found[0] != sum(found[1:]):
        wrong.append(f"issued, trained, dropped, active are {found} in the ledger, {report} in the log")
    steps = [line["step"] for line in read_steps(run_dir / "metrics.jsonl")]
    if steps != list(range(status.steps)):
        wrong.append(f"metrics.jsonl has {len(steps)} of {status.steps} steps")
    with (run_dir / "audit.jsonl").open() as lines:
        wrong += trained_twice(json.loads(line) for line in lines)
    return report


def trained_twice(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return groups that are in two committed steps of the path to the last version.

    Computed independently of `tether verify`.
    """
    steps: dict[int, list[int]] = {}
    for event in events:
        if event["event"] == "commit":
            steps[event["step"]] = [int(group) for group in event["groups"]]
        elif event["event"] == "resume" and not event["continued"]:
            steps = {step: groups for step, groups in steps.items() if step < event["version"]}
    counts = Counter(group for groups in steps.values() for group in groups)
    return [f"group {group} was trained {count} times" for group, count in counts.items() if count > 1]


def check_leftovers(root: Path, run_dir: Path, shared: Iterable[Path]) -> list[str]:
    """Check that no process, shared memory or temporary file is left.

    In the run directory there may be only what a run without faults leaves.
    """
    wrong = [f"process {child.pid} is left: {' '.join(child.cmdline())}" for child in living_children()]
    wrong += [f"{path} is left" for path in shared]
    wrong += [f"{path} is left" for path in (root / "tmp").iterdir()]
    files = [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if not path.is_dir()]
    return wrong + [
        f"{name} is left in the run directory" for name in files if not LEFT_BY_A_CLEAN_RUN.fullmatch(name)
    ]


def living_children() -> list[psutil.Process]:
    """Return descendants of this process, and of orphans that it adopted, that are not zombies."""
    return [
        child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
    ]
