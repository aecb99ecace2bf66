"""Resources of a run: nothing grows with the work done, in this process and (slow) in real processes."""

import asyncio
import math
from pathlib import Path

import pytest

from services.bus import receiver
from services.ledger.event_log.archiver import FILE
from services.ledger.redis.keys import NAMES
from services.ledger.verify.verifier import verify
from tests.changes import slow_unless_changed
from tests.integration.loop import LiveRun, running, settings_for
from tests.trials.soak.census import census
from tests.trials.soak.probe import GROUP_KEYS, Probe
from tests.trials.soak.run import run
from tests.trials.soak.verdict import misplaced

B, E = 4, 2
KEPT = (2 + 1) * 5
"""Steps whose records are kept: two checkpoints, one every five steps, and what came since."""
FAST = (
    "run.steps=1000000", f"bound.groups_per_step={B}", f"bound.max_staleness={E}",
    "engine.seconds_per_token=0.0",
    "engine.straggler_share=0.0", "trainer.step_s=0.0", "trainer.checkpoint_every=5",
    "rollout.groups_in_flight=2", "reward.workers=1",
)  # fmt: skip


BLOCKS = 8
"""Blocks of Python's allocator for each group done that are noise; a rollout that is not forgotten is
dozens."""


async def least(live: LiveRun, version: int) -> dict[str, int]:
    """Return the smallest of some counts taken from `version` on, since work in flight varies."""
    found = {"blocks": 1 << 60, "descriptors": 1 << 60, "tasks": 1 << 60}
    for target in range(version, version + 12, 3):
        async with asyncio.timeout(600):
            while (await live.ledger.head()).version < target:  # noqa: ASYNC110 (another process's counter)
                await asyncio.sleep(0.01)
        now = census() | {"tasks": len(asyncio.all_tasks())}
        found = {name: min(count, now[name]) for name, count in found.items()}
    return found


async def ledger_is_trimmed(live: LiveRun) -> None:
    """Check that the ledger's keys are the fixed ones, and hold only what is still needed.

    That is active groups, and those that no checkpoint covers.
    """
    probe = Probe({}, live.settings.ledger.url, live.settings.run.name, live.settings.run_dir)
    try:
        sample = await asyncio.to_thread(probe.sample)
        group_bytes = await asyncio.to_thread(probe.group_bytes)
    finally:
        probe.close()
    active, kept = B * (E + 2), B * KEPT
    assert sample["keys"] <= len(NAMES)
    sizes = sample["sizes"]
    assert {name for name in GROUP_KEYS if sizes.get(name, 0) > active} <= {"groups", "trained"}
    assert max(sizes["groups"], sizes["trained"]) <= active + kept
    assert max(sizes["steps"], sizes["reports"]) <= KEPT
    assert sizes["engines"] == 4
    assert group_bytes < 2000 * (active + kept)


@slow_unless_changed("services/ledger/", "services/ingest/", "tests/trials/soak/")
@pytest.mark.timeout(900)  # seconds, on a machine that has nothing else to do
async def test_nothing_grows_with_the_groups_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REMEMBERED_IDS", 32)  # a bound that is full from the start
    settings = settings_for(tmp_path / "run", "stragglers.toml", *FAST)
    async with asyncio.timeout(800), running(settings, rollouts=4, rewards=2) as live:
        before = await least(live, 20)
        await ledger_is_trimmed(live)
        after = await least(live, 110)
        await ledger_is_trimmed(live)
        labels = [
            metric_lines(process.metrics) for processes in live.processes.values() for process in processes
        ]
        status = await live.ledger.status()
    groups = 90 * B
    for name, count in after.items():
        assert count - before[name] < BLOCKS * groups, (name, before, after)
    assert max(labels) < 200
    audit = verify(settings.run_dir / FILE)
    assert audit.violations == []
    found = misplaced(settings.run_dir / FILE)
    assert (found["doubled"], found["held"]) == ([], [])
    assert audit.issued == audit.trained + audit.dropped + len(found["open"])
    assert audit.trained >= status.trained


def metric_lines(metrics: object) -> int:
    """Return the samples that a service shows on /metrics."""
    return sum(len(family.samples) for family in metrics.registry.collect())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_minutes_of_forty_workers_lose_and_double_nothing(tmp_path: Path) -> None:
    found = asyncio.run(run(tmp_path, minutes=3, rollouts=40, rewards=4))
    slopes = [
        text for text in found["failures"] if "memory grows" in text
    ]  # judged over fifteen minutes, not over three
    assert [text for text in found["failures"] if text not in slopes] == []
    assert found["groups"]["trained"] > 0
    assert found["ledger_keys"][1] <= len(NAMES) + 1
    assert all(math.isfinite(slope) for slope in found["rss_slope_mb_per_min"].values())
