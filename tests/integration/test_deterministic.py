"""Runs with `run.deterministic`: twice the same tokens and weights, whatever workers there are and die."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.run_record.steps import read_steps
from services.settings.load import dump_settings
from services.tools.recorded.comparison import compare_runs
from tests.changes import VLLM, slow_unless_changed
from tests.integration.command import audit, pids, tether, tether_up, until
from tests.integration.loop import ROOT, run_to_end, running, settings_for

STEPS, B, E = 8, 6, 2
OVERRIDES = (
    f"run.steps={STEPS}",
    "run.deterministic=true",
    f'run.modules=["{ROOT}"]',
    "bound.staleness_policy=wait",
    f"bound.max_staleness={E}",
    f"bound.groups_per_step={B}",
    "sampling.samples_per_prompt=4",
    "sampling.max_tokens=6",
    "engine.name=hf",
    "rollout.lease_s=2",
    "rollout.groups_in_flight=4",
    "bus.peer_timeout_s=2",
    'reward.verifiers=[{name="function", options={path="tests.integration.synchronous:score"}}]',
    "trainer.checkpoint_every=3",
    "monitor.enabled=false",
    "eval.at_end=false",
)
KILLS = (
    "services/trainer/", "services/rollout/", "services/ledger/redis/", "rollout/engines/hf/",
    "rollout/engines/in_process/", "rollout/seeds.py", "tests/integration/test_deterministic.py",
)  # fmt: skip


async def made(run_dir: Path, *more: str, rollouts: int = 1) -> Path:
    """Make a run in this process; returns its directory."""
    settings = settings_for(run_dir, "demo.toml", *OVERRIDES, *more)
    run = await run_to_end(settings, rollouts=rollouts)
    dump_settings(settings, run_dir / "settings.json")
    assert run.audit.violations == []
    assert [step["lag_max"] for step in run.steps] == [min(step, E) for step in range(settings.run.steps)]
    return run_dir


def commits(run_dir: Path) -> Iterator[tuple[int, int]]:
    """Version and digest of each commit in the log."""
    for line in (run_dir / "audit.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "commit":
            yield event["version"], int(event["digest"])


@slow_unless_changed(*KILLS)
async def test_a_run_is_the_same_with_one_worker_and_with_three(tmp_path: Path) -> None:
    one = await made(tmp_path / "one")
    three = await made(tmp_path / "three", "rollout.groups_in_flight=2", rollouts=3)
    assert dict(commits(one)) == dict(commits(three))
    assert len(dict(commits(one))) == STEPS
    assert len({digest for _, digest in commits(one)}) >= STEPS - 1  # the weights do change
    assert compare_runs(one, three)["difference"] is None
    other = await made(tmp_path / "other", "trainer.seed=1", "run.steps=1")
    told = tether("bisect", str(one), str(other))
    assert told.returncode == 1
    assert "equal up to version 0" in told.stdout
    assert "trainer.seed 0 -> 1" in told.stdout
    assert "step 0 differs first: group 0, sample " in told.stdout


@slow_unless_changed(*KILLS)
def test_a_run_is_the_same_after_kills(tmp_path: Path) -> None:
    whole, killed = asyncio.run(made(tmp_path / "whole")), tmp_path / "killed"
    words = [word for override in OVERRIDES for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/demo.toml")
    output = tmp_path / "up.log"
    with tether_up(config, *words, "--rollouts", "2", "--run-dir", str(killed), output=output) as up:
        for step, name in ((1, "rollout.0"), (2, "trainer"), (4, "rollout.1"), (5, "trainer")):
            until(lambda: len(read_steps(killed / "metrics.jsonl")) >= step, seconds=180, what="a step")  # noqa: B023
            alive = until(lambda: (found := pids(killed)).get(name) and found, seconds=60, what=name)  # noqa: B023
            os.kill(alive[name], signal.SIGKILL)
        assert up.wait(400) == 0, output.read_text()
    assert audit(killed)["violations"] == []
    assert dict(commits(killed)) == dict(commits(whole))
    assert compare_runs(whole, killed)["difference"] is None


@slow_unless_changed(*KILLS)
async def test_a_run_that_was_drained_goes_on_as_if_it_was_not(tmp_path: Path) -> None:
    whole, drained = await made(tmp_path / "whole"), tmp_path / "drained"
    async with running(settings_for(drained, "demo.toml", *OVERRIDES)) as live, asyncio.timeout(120):
        while (await live.ledger.status()).version < 3:  # noqa: ASYNC110 (the ledger tells nobody)
            await asyncio.sleep(0.01)
        await live.ledger.drain()
        await live.trained.wait()
        assert (await live.ledger.status()).version < STEPS
    assert await made(drained) == drained
    assert dict(commits(drained)) == dict(commits(whole))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@slow_unless_changed(*VLLM)
async def test_a_run_on_vllm_is_the_same_with_one_worker_and_with_two(tmp_path: Path) -> None:
    longer = ("engine.name=vllm", "sampling.max_tokens=20")
    one = await made(tmp_path / "one", *longer)
    two = await made(tmp_path / "two", *longer, rollouts=2)
    assert compare_runs(one, two)["difference"] is None
    assert len({digest for _, digest in commits(one)}) >= STEPS - 1
