"""Engines get every N-th version, or none: the bound counts all versions, and a new trainer publishes the one
that it continues from."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from services.evaluation.service import read_snapshots
from services.ledger.verify.verifier import verify
from services.run_record.evaluations import read_evaluations
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.gate import Spot, When
from tests.integration.loop import run_to_end, running, settings_for
from tests.integration.test_live_changes import drained, dry, log_of, more_steps, reached
from tests.integration.trainer_place import place

CHANGED = slow_unless_changed(
    "protocol/staleness", "services/ledger/", "services/ingest/", "services/rollout/", "services/trainer/",
    "tests/integration/test_publish_every.py",
)  # fmt: skip
QUICK = ("trainer.step_s=0.01", "engine.seconds_per_token=0.001", "engine.straggler_share=0")


def applied(events: list[dict[str, Any]]) -> set[int]:
    """Versions that engines served."""
    return {event["version"] for event in events if event["event"] == "applied"}


async def test_engines_get_every_third_version_and_lag_behind_it(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path,
        "stragglers.toml",
        *QUICK,
        "trainer.publish_every=3",
        "bound.max_staleness=3",
        "run.steps=10",
        "eval.every=4",
        "eval.prompts=2",
    )
    found = await run_to_end(settings, rollouts=2)
    assert (found.audit.violations, found.audit.steps) == ([], 10)
    assert {0, 3, 6} <= applied(found.events) <= {0, 3, 6, 9}
    assert 2 <= max(step["lag_max"] for step in found.steps) <= 3
    assert {event["version"] % 3 for event in found.events if event["event"] == "lease"} == {0}
    copied = {snapshot.version for snapshot in read_snapshots(tmp_path)}
    scored = {evaluation.version for evaluation in read_evaluations(tmp_path)}
    assert 10 in copied | scored  # also a version that engines did not get is evaluated


@CHANGED
async def test_fixed_weights_are_kept_also_by_the_next_trainer(tmp_path: Path) -> None:
    overrides = (*QUICK, "trainer.publish_every=0", "bound.max_staleness=8", "trainer.checkpoint_every=2")
    first = settings_for(tmp_path, "stragglers.toml", *overrides, "run.steps=4")
    await run_to_end(first)
    found = await run_to_end(settings_for(tmp_path, "stragglers.toml", *overrides, "run.steps=9"))
    assert (found.audit.violations, found.audit.steps) == ([], 9)
    assert applied(found.events) == {0}
    assert [step["lag_max"] for step in found.steps] == list(range(9))


async def test_next_trainer_publishes_the_version_that_it_continues_from(tmp_path: Path) -> None:
    async with place(tmp_path, "run.steps=9", "trainer.publish_every=3", "bound.max_staleness=2") as here:
        killed = await here.held(Spot("commit", When.AFTER), after_step=4)
        version = (await here.ledger.head()).version
        await here.kill(killed)
        last = await here.trainer()
        assert await last.wait() == 0, here.log(1).read_text()
    assert version == 5
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == list(range(9))
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {0, 3, 5} <= applied(events) <= {0, 3, 5, 8}
    assert verify(tmp_path / "audit.jsonl").violations == []


@CHANGED
async def test_late_engine_gets_the_newest_published_version(tmp_path: Path) -> None:
    settings = dry(tmp_path, "trainer.publish_every=4", "bound.max_staleness=7")
    async with running(settings) as live:
        await reached(live.ledger, lambda status: status.version >= 5)
        head = await live.ledger.head()
        assert head.published % 4 == 0
        assert head.version - head.published < 4
        await more_steps(live, 8)
        await drained(live)
    assert {version % 4 for version in applied(log_of(settings))} == {0}


@CHANGED
async def test_lower_bound_publishes_earlier_instead_of_stopping_the_run(tmp_path: Path) -> None:
    settings = dry(tmp_path, "trainer.publish_every=5", "bound.max_staleness=4")
    async with running(settings) as live:
        await more_steps(live, 3)
        await live.ledger.set_bound(max_staleness=1)
        await reached(live.ledger, lambda status: status.pending is None)
        changed = (await live.ledger.status()).version
        await more_steps(live, 8)
        await drained(live)
    served = sorted(version for version in applied(log_of(settings)) if version > changed)
    assert max(after - before for before, after in pairwise(served)) == 2
    assert verify(settings.run_dir / "audit.jsonl").violations == []


def test_bound_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="publish_every"):
        settings_for(tmp_path, "stragglers.toml", "trainer.publish_every=3", "bound.max_staleness=1")
