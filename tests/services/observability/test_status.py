"""Tests the state of a run as data and as text, and the printed waits, on a ledger in memory."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.errors import Reason, Refused, Unavailable
from protocol.messages import StepReport
from protocol.staleness import Policy
from protocol.topics import Role
from services.ledger.interface import Peer
from services.observability.durations import seconds_text
from services.observability.status import collect_status, render_status
from services.run_record.progress import Progress, describe_step, describe_waits
from services.run_record.steps import STALENESS, StepLog, step_facts
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.contracts.memory_ledger.ledger import MemoryLedger


@dataclass
class Child:
    """A process that a supervisor keeps."""

    name: str
    restarts: int = 0
    registers: bool = True


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
        "running": 12,
        "kv_use": 0.456,
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
    assert status["engines"] == [
        {
            "engine": "eng",
            "epoch": "e1",
            "version": 0,
            "running": 12,
            "kv_use": 0.456,
            "prefix_hits": None,
            "drafts_accepted": None,
            "draft_digest": None,
        }
    ]


async def test_an_engine_that_does_not_know_how_full_it_is_shows_nothing_of_it(driver: Driver) -> None:
    await driver.ledger.register(Peer("rollout", "eng", {"name": "rollout.0", "running": None}), 60_000)
    status = await collect_status(driver.ledger)
    assert [(engine["running"], engine["kv_use"]) for engine in status["engines"]] == [(None, None)]
    assert "engine eng: version 0 of epoch e1\n" in render_status(status)


async def test_a_run_that_was_never_made_has_no_status() -> None:
    with pytest.raises(Refused) as refusal:
        await collect_status(MemoryLedger())
    assert refusal.value.reason == Reason.NO_RUN


async def test_the_text_names_what_waits_and_hides_short_waits(driver: Driver) -> None:
    text = render_status(await collect_status(driver.ledger))
    assert "running: version 0 of 100, bound E=1 B=2 wait" in text
    assert "issued 3, trained 0, dropped 0, active 3" in text
    assert "rollout.0    pid 12 on h, waits for lease: bound, 3 s so far" in text
    assert "group 7" not in text
    assert "engine eng: version 0 of epoch e1, 12 running, KV cache 46%" in text


async def test_the_text_names_drops_and_what_is_pending(driver: Driver) -> None:
    lease = await driver.lease()
    await driver.ledger.drop(lease.group, lease.token, "prompt")
    await driver.ledger.set_bound(groups_per_step=1, policy=Policy.MASK)
    text = render_status(await collect_status(driver.ledger))
    assert "dropped: prompt 1" in text
    assert "pending: E=1 B=1 mask" in text


async def test_the_text_has_reward_rate_and_remaining_time_in_the_words_of_the_view(driver: Driver) -> None:
    last = dict.fromkeys(STALENESS) | {"version": 4, "reward_mean": 0.5, "trained_tokens": 300, "step_s": 2.0}
    facts = {"last_step": last, "seconds_per_step": 2.5}
    text = render_status(await collect_status(driver.ledger) | facts)
    assert "reward 0.500  150 tokens/s  2.5 s a step  ETA 4 min 10 s\n" in text


async def test_deliveries_that_a_worker_waits_for_are_one_activity(driver: Driver) -> None:
    waits = {f"acknowledgement of group {group}": float(group) for group in range(2, 16)}
    await driver.ledger.register(Peer("rollout", "other", {"name": "rollout.1", "waits": waits}), 60_000)
    text = render_status(await collect_status(driver.ledger))
    assert text.endswith("waits for rewards (14 groups), 15 s so far")


async def test_a_draining_run_says_so(driver: Driver) -> None:
    await driver.ledger.drain()
    assert (await collect_status(driver.ledger))["run_state"] == "draining"


# -- who waits for whom
async def test_waits_that_differ_in_a_number_only_are_one(driver: Driver) -> None:
    waits = {f"acknowledgement of group {group}": float(group) for group in (7, 8, 9)}
    await driver.ledger.register(Peer("rollout", "other", {"name": "rollout.1", "waits": waits}), 60_000)
    assert await describe_waits(driver.ledger) == (
        "waiting: rollout.0: waits for lease: bound, 3 s so far; "
        "rollout.1: waits for rewards (3 groups), 9 s so far"
    )


async def test_a_run_in_which_nobody_waits_says_so() -> None:
    driver = await Driver(MemoryRig()).begin()
    await driver.ledger.register(Peer("reward", "r", {"name": "reward.0", "waits": {"x": 0.5}}), 60_000)
    assert await describe_waits(driver.ledger) == "waiting: no process waits for another one"


async def test_a_run_that_starts_names_who_is_not_there_yet() -> None:
    driver = await Driver(MemoryRig()).begin()
    await driver.ledger.register(
        Peer("trainer", "t", {"name": "trainer", "work": {"step 3": (1, 120.0)}}), 60_000
    )
    children = {"any": [Child("trainer"), Child("rollout.0"), Child("reward.0", restarts=2)]}
    assert await describe_waits(driver.ledger, children) == (
        "waiting: trainer: step 3, 120 s so far; rollout.0: starts; reward.0: starts again"
    )


async def test_a_run_without_rollout_workers_says_that_they_are_scaled_to_0() -> None:
    ledger = (await Driver(MemoryRig()).begin()).ledger
    waits = {"groups: not_enough: 0 of 2": 9.0}
    await ledger.register(Peer("trainer", "t", {"name": "trainer", "waits": waits}), 60_000)
    await ledger.register(Peer("reward", "r", {"name": "reward.0"}), 60_000)
    children = {Role.TRAINER: [Child("trainer")], Role.ROLLOUT: [], Role.REWARD: [Child("reward.0")]}
    trainer = "trainer: waits for rollouts and rewards: 0 of 2, 9 s so far"
    assert await describe_waits(ledger, children) == (
        f"waiting: rollouts are scaled to 0: no step is made without one; {trainer}"
    )
    said = "no rollout worker: rollouts are scaled to 0, or not started\n"
    assert said in render_status(await collect_status(ledger))
    await ledger.register(Peer("rollout", "other", {"name": "rollout.7"}), 60_000)  # of another host
    assert await describe_waits(ledger, children) == f"waiting: {trainer}"
    assert said not in render_status(await collect_status(ledger))


async def test_a_ledger_that_is_away_is_what_is_waited_for() -> None:
    class Away(MemoryLedger):
        async def peers(self, role: str | None = None) -> list[Peer]:
            raise Unavailable("127.0.0.1:1 is away")

    assert await describe_waits(Away()) == "waiting: the ledger does not answer (127.0.0.1:1 is away)"


# -- progress
async def test_progress_prints_every_step_once_and_how_it_ended(tmp_path: Path, driver: Driver) -> None:
    out, run_dir = io.StringIO(), tmp_path / "my run"
    progress = Progress(run_dir, 100, out)
    log = StepLog(run_dir / "metrics.jsonl")
    for step in range(2):
        log.append(
            StepReport(
                step=step,
                version=step + 1,
                epoch="e1",
                reward_mean=0.25,
                lag_mean=0.0,
                lag_max=1,
                trained_tokens=30,
                train_s=3.0,
                step_s=3.0,
            )
        )
    progress._print_steps(restarts=2)
    progress.finish(await driver.ledger.status())
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[3] == f"see it with `tether monitor '{run_dir}'`"
    assert lines[0].startswith("version    1/100  reward  0.250  lag 0.00 max 1        10 tokens/s")
    assert lines[0].endswith("restarts 2")
    assert "publish 0.00 s" in lines[1]
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
        "version    2",
        "version    1",
        "version    2",
    ]


async def test_progress_is_quiet_about_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    Progress(tmp_path, 1, out).note("")
    assert out.getvalue() == ""


def test_a_step_without_measurements_has_dashes_instead_of_numbers() -> None:
    line = {"step": 0, "version": 1, "epoch": "e1", "reward_mean": None, "trained_tokens": 5, "train_s": 0.0}
    text = describe_step(line, 9, 0)
    assert text.startswith("version    1/9  reward -  lag - max -         - tokens/s  wait - s  train 0.00 s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.0, "59 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min"), (273_600.0, "3 d 4 h")],
)
def test_durations_are_told_in_two_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


async def test_the_status_says_what_groups_without_signal_cost(driver: Driver) -> None:
    lease = await driver.lease()
    await driver.ledger.filter(lease.group, lease.token, 30, 1.0, 0)
    status = await collect_status(driver.ledger)
    assert (status["wasted_tokens"], status["wasted_by_reason"]) == (30, {"no_signal": 30})
    assert "dropped: no_signal 1 (30 tokens)" in render_status(status)


async def test_the_status_says_how_stale_the_last_step_was(tmp_path: Path, driver: Driver) -> None:
    assert "masked" not in render_status(await collect_status(driver.ledger) | step_facts(tmp_path))
    log = StepLog(tmp_path / "metrics.jsonl")
    staleness: dict[str, float] = {"lag_mean": 0.5, "lag_max": 1, "masked_share": 0.25}
    for version, fields in ((1, staleness), (2, {})):
        log.append(StepReport(step=version - 1, version=version, epoch="e", reward_mean=0.0, **fields))  # type: ignore[arg-type]
        status = await collect_status(driver.ledger) | step_facts(tmp_path)
        expected = (
            "lag mean 0.50 max 1, masked tokens 25.0%" if fields else "lag mean - max -, masked tokens -"
        )
        assert f"step to version {version}: {expected}" in render_status(status)
        expected_step = {"version": version, **dict.fromkeys(staleness), **fields}
        assert status["last_step"].items() >= expected_step.items()
