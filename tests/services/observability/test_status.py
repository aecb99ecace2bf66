"""Tests the state of a run as data and as text, and the printed waits, on a ledger in memory."""

import io
import json
from pathlib import Path

import pytest

from protocol.errors import Reason, Refused, Unavailable
from protocol.messages import StepReport
from protocol.staleness import Policy
from services.ledger.interface import Peer
from services.ledger.memory.ledger import MemoryLedger
from services.observability.progress import Progress, describe_waits
from services.observability.status import collect_status, render_status
from services.observability.steps import StepLog
from tests.contracts.ledger_rig import Driver, MemoryRig


@pytest.fixture
async def driver() -> Driver:
    """E = 1, B = 2, wait: three groups are leased, two of them scored; one of two engines is in the
    registry."""
    driver = await Driver(MemoryRig()).begin(engines=("eng", "gone"))
    await driver.scored(2)
    await driver.lease()
    info = {
        "name": "rollout.0",
        "pid": 12,
        "host": "h",
        "http": 8,
        "waits": {"lease: bound": 3.4, "group 7": 0.2},
    }
    await driver.ledger.register(Peer("rollout", "eng", info), 60_000)
    return driver


async def test_the_status_is_data_that_json_can_hold(driver: Driver) -> None:
    status = await collect_status(driver.ledger)
    assert json.loads(json.dumps(status)) == status


async def test_the_status_counts_groups_by_state(driver: Driver) -> None:
    status = await collect_status(driver.ledger)
    assert (status["run_state"], status["version"], status["steps"], status["epoch"]) == (
        "running",
        0,
        100,
        "e1",
    )
    assert (status["issued"], status["trained"], status["dropped"], status["active"]) == (3, 0, 0, 3)
    assert {state: count for state, count in status["groups"].items() if count} == {"leased": 1, "scored": 2}
    assert status["bound"] == {"max_staleness": 1, "groups_per_step": 2, "policy": "wait"}
    assert status["pending_bound"] is None


async def test_the_status_lists_live_processes_and_their_engines(driver: Driver) -> None:
    status = await collect_status(driver.ledger)
    assert [(item["service"], item["name"], item["pid"], item["host"]) for item in status["processes"]] == [
        ("rollout", "rollout.0", 12, "h")
    ]
    assert status["engines"] == [{"engine": "eng", "epoch": "e1", "version": 0}]


async def test_a_run_that_was_never_made_has_no_status() -> None:
    with pytest.raises(Refused) as refusal:
        await collect_status(MemoryLedger())
    assert refusal.value.reason == Reason.NO_RUN


async def test_the_text_names_what_waits_and_hides_short_waits(driver: Driver) -> None:
    text = render_status(await collect_status(driver.ledger))
    assert "running: version 0 of 100, bound E=1 B=2 wait" in text
    assert "issued 3, trained 0, dropped 0, active 3" in text
    assert "rollout.0    pid 12 on h, waits for lease: bound 3 s" in text
    assert "group 7" not in text
    assert "engine eng: version 0 of epoch e1" in text


async def test_the_text_names_drops_and_what_is_pending(driver: Driver) -> None:
    lease = await driver.lease()
    await driver.ledger.drop(lease.group, lease.token, "prompt")
    await driver.ledger.set_bound(groups_per_step=1, policy=Policy.MASK)
    text = render_status(await collect_status(driver.ledger))
    assert "dropped: prompt 1" in text
    assert "pending: E=1 B=1 mask" in text


async def test_a_draining_run_says_so(driver: Driver) -> None:
    await driver.ledger.drain()
    assert (await collect_status(driver.ledger))["run_state"] == "draining"


# -- who waits for whom
async def test_waits_that_differ_in_a_number_only_are_one(driver: Driver) -> None:
    waits = {"acknowledgement of group 7": 2.0, "acknowledgement of group 8": 9.4, "ingest for group 3": 0.5}
    await driver.ledger.register(Peer("rollout", "other", {"name": "rollout.1", "waits": waits}), 60_000)
    assert await describe_waits(driver.ledger) == (
        "waiting: rollout.0 waits for lease: bound (3 s); "
        "rollout.1 waits for acknowledgement of group N (2 times, 9 s)"
    )


async def test_a_run_in_which_nobody_waits_says_so() -> None:
    driver = await Driver(MemoryRig()).begin()
    await driver.ledger.register(Peer("reward", "r", {"name": "reward.0", "waits": {"x": 0.5}}), 60_000)
    assert await describe_waits(driver.ledger) == "waiting: 1 processes are up, none of them waits"


async def test_a_ledger_that_is_away_is_what_is_waited_for() -> None:
    class Away(MemoryLedger):
        async def peers(self, role: str | None = None) -> list[Peer]:
            raise Unavailable("127.0.0.1:1 is away")

    assert await describe_waits(Away()) == "waiting: the ledger does not answer (127.0.0.1:1 is away)"


# -- progress
async def test_progress_prints_every_step_once_and_how_it_ended(tmp_path: Path, driver: Driver) -> None:
    out = io.StringIO()
    progress = Progress(tmp_path, 100, out)
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in range(2):
        log.append(
            StepReport(
                step=step,
                version=step + 1,
                epoch="e1",
                reward_mean=0.25,
                lag_max=1,
                trained_tokens=30,
                train_s=3.0,
            )
        )
    progress._print_steps(restarts=2)
    progress.finish(await driver.ledger.status())
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step    1/100  reward  0.250  lag 0.00 max 1        10 tokens/s")
    assert lines[0].endswith("restarts 2")
    assert lines[2].startswith("stopped at version 0 of 100 after ")
    assert lines[2].endswith("0 groups trained, 0 dropped, 3 in flight")


def test_progress_prints_steps_that_a_rewind_made_again(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    log.append(StepReport(step=0, version=1, epoch="e1", reward_mean=0.0))
    out = io.StringIO()
    progress = Progress(tmp_path, 9, out)
    for step, epoch in ((1, "e1"), (0, "e2"), (1, "e2")):
        log.append(StepReport(step=step, version=step + 1, epoch=epoch, reward_mean=0.0))
        progress._print_steps(restarts=0)
    progress._print_steps(restarts=0)
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == [
        "step    2",
        "step    1",
        "step    2",
    ]


async def test_progress_is_quiet_about_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    Progress(tmp_path, 1, out).note("")
    assert out.getvalue() == ""
