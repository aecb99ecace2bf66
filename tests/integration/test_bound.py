"""The staleness bound on the real loop: for every E and policy, with few long and many middling
stragglers."""

import asyncio
from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from services.settings.sections import Settings
from tests.changes import slow_unless_changed
from tests.integration.loop import run_to_end, running, settings_for

STRAGGLERS = {
    "few": ("engine.straggler_share=0.05", "engine.straggler_factor=20.0"),
    "many": ("engine.straggler_share=0.4", "engine.straggler_factor=10.0"),
}


def settings_of(run_dir: Path, bound: int, policy: str, stragglers: str, *overrides: str) -> Settings:
    """A dry run with small steps and much in flight."""
    return settings_for(
        run_dir, "stragglers.toml", f"bound.max_staleness={bound}", f"bound.staleness_policy={policy}",
        *STRAGGLERS[stragglers], "engine.seconds_per_token=0.002", "trainer.step_s=0.01",
        "rollout.groups_in_flight=64", *overrides,
    )  # fmt: skip


BOUNDS, POLICIES = (0, 1, 2, 4), ("wait", "mask", "drop")
CHANGED = slow_unless_changed(
    "services/ledger/", "services/ingest/", "services/rollout/", "services/trainer/", "protocol/staleness",
    "tests/integration/test_bound.py",
)  # fmt: skip
ALWAYS = {(0, "wait"), (1, "wait"), (1, "mask"), (2, "drop")}
STEPS = 10


def marks_of(row: int, column: int, kind: int) -> list[pytest.MarkDecorator]:
    if (row + column + kind) % 2 or BOUNDS[row] == 4:
        return [pytest.mark.slow]
    return [] if (BOUNDS[row], POLICIES[column]) in ALWAYS else [CHANGED]


CASES = [
    pytest.param(bound, policy, stragglers, marks=marks_of(row, column, kind))
    for row, bound in enumerate(BOUNDS)
    for column, policy in enumerate(POLICIES)
    for kind, stragglers in enumerate(STRAGGLERS)
]
"""Every combination. Those that are not slow have each policy with each bound up to 2, and with both kinds of
stragglers."""


@pytest.mark.parametrize(("bound", "policy", "stragglers"), CASES)
async def test_no_trained_token_is_over_the_bound(
    tmp_path: Path, bound: int, policy: str, stragglers: str
) -> None:
    run = await run_to_end(settings_of(tmp_path, bound, policy, stragglers, f"run.steps={STEPS}"))
    assert run.audit.violations == []
    assert run.status.version == STEPS
    assert run.audit.max_lag <= bound
    assert max(step["lag_max"] for step in run.steps) <= bound
    if policy == "wait":
        assert run.audit.max_lag == bound
        assert run.status.dropped == 0
        assert sum(step["masked_tokens"] for step in run.steps) == 0
        assert sum(step["wait_s"] for step in run.steps) > 0


@pytest.mark.parametrize(
    ("policy", "stragglers"),
    [
        ("mask", "few"),
        ("drop", "many"),
        *(pytest.param(*case, marks=CHANGED) for case in (("mask", "many"), ("drop", "few"))),
    ],
)
async def test_late_groups_are_masked_or_dropped(tmp_path: Path, policy: str, stragglers: str) -> None:
    """A straggler takes many steps, also on a slow machine, and the run continues until one was too late."""
    settings = settings_of(
        tmp_path, 1, policy, stragglers, "run.steps=1000000", "engine.straggler_factor=100.0"
    )
    async with asyncio.timeout(400), running(settings) as live:

        async def seen() -> bool:
            dropped = (await live.ledger.status()).dropped_by_reason
            masked = sum(step["masked_tokens"] for step in read_steps(tmp_path / "metrics.jsonl"))
            return "straggler" in dropped if policy == "drop" else masked > 0 or "stale" in dropped

        while not await seen():  # noqa: ASYNC110 (the ledger is asked)
            await asyncio.sleep(0.02)
    result = verify(tmp_path / FILE)
    assert result.violations == []
    assert result.max_lag <= 1
