"""What may be changed while a run is on: the bound, the numbers of processes, draining, halting; and who may
not disturb whom."""

import asyncio
import dataclasses
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from protocol.staleness import Policy
from protocol.topics import Role
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import FILE
from services.ledger.interface import LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from services.settings.sections import Settings
from tests.changes import LAUNCHER, slow_unless_changed
from tests.integration.command import processes_of, tether_here, tether_up, until
from tests.integration.loop import ROOT, LiveRun, running, settings_for

CALM = ("trainer.step_s=0.2", "engine.seconds_per_token=0.02", "run.steps=1000000")
"""Leaves the processor to the processes that start beside it."""
FAST = ("trainer.step_s=0.01", "engine.seconds_per_token=0.001", "run.steps=1000000")


def dry(run_dir: Path, *overrides: str) -> Settings:
    """A dry run without an end."""
    return settings_for(run_dir, "stragglers.toml", *FAST, *overrides)


def log_of(settings: Settings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (settings.run_dir / FILE).read_text().splitlines()]


async def reached(
    ledger: RedisLedger, ready: Callable[[LedgerStatus], bool], *, seconds: float = 400
) -> LedgerStatus:
    """Ask the ledger until it says what is waited for."""
    async with asyncio.timeout(seconds):
        while not ready(status := await ledger.status()):  # noqa: ASYNC110 (the ledger is asked)
            await asyncio.sleep(0.02)  # leaves the processor to those that are waited for
    return status


async def more_steps(live: LiveRun, number: int) -> LedgerStatus:
    """Wait for `number` steps from now on."""
    goal = (await live.ledger.status()).version + number
    return await reached(live.ledger, lambda status: status.version >= goal)


async def drained(live: LiveRun) -> LedgerStatus:
    """End the run by draining it."""
    await live.ledger.drain()
    async with asyncio.timeout(400):
        await live.trained.wait()
    return await live.ledger.status()


async def test_the_bound_is_changed_while_a_run_is_on(tmp_path: Path) -> None:
    settings = dry(tmp_path, "bound.max_staleness=2", "bound.groups_per_step=6")
    changes: list[dict[str, Any]] = [
        {"max_staleness": 0}, {"groups_per_step": 2}, {"policy": Policy.WAIT},
        {"max_staleness": 3, "groups_per_step": 5}, {"policy": Policy.DROP},
        {"groups_per_step": 1, "max_staleness": 1, "policy": Policy.MASK},
    ]  # fmt: skip
    async with running(settings, rollouts=2) as live:
        for change in changes:
            await more_steps(live, 3)
            await live.ledger.set_bound(**change)
            await reached(live.ledger, lambda status: status.pending is None)
            bound = (await live.ledger.status()).bound
            assert {name: getattr(bound, name) for name in change} == change
        await more_steps(live, 3)
        await drained(live)
    assert verify(settings.run_dir / FILE).violations == []
    force, leases, sizes = dict[str, Any](), dict[int, dict[str, Any]](), set[int]()
    for event in log_of(settings):
        if event["event"] in ("create", "bound"):
            force = {name: event[name] for name in ("max_staleness", "groups_per_step", "policy")}
        elif event["event"] == "lease":
            assert (event["bound"], event["groups_per_step"], event["policy"]) == tuple(force.values())
            leases[event["group"]] = event
        elif event["event"] == "commit":
            sizes.add(len(event["groups"]))
            for group, counts in event["groups"].items():
                lags = [event["step"] - int(version) for version, n in counts.items() if n]
                assert max(lags, default=0) <= leases[int(group)]["bound"]
    assert {6, 2, 5, 1} <= sizes


async def test_a_drained_run_ends_by_itself_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    settings = dry(tmp_path, "bound.groups_per_step=5")
    async with running(settings) as live:
        await more_steps(live, 2)
        first = await drained(live)
    assert first.draining
    assert not first.done
    assert first.active == 0
    assert first.issued == first.trained + first.dropped
    steps = read_steps(settings.run_dir / "metrics.jsonl")
    assert all(step["groups"] == 5 for step in steps[:-1])
    assert (settings.run_dir / "checkpoints" / f"step_{first.version:08d}" / "manifest.json").exists()
    async with running(settings) as live:
        second = await more_steps(live, 2)
        await drained(live)
    assert second.version >= first.version + 2
    assert verify(settings.run_dir / FILE).violations == []


@slow_unless_changed("services/ledger/", "services/ingest/", "services/rollout/", "services/runtime/")
async def test_leasing_stops_while_the_log_cannot_be_archived(tmp_path: Path) -> None:
    limit, most = 300, 64
    settings = dry(tmp_path / "run", f"ledger.archive_limit={limit}", f"rollout.groups_in_flight={most}")
    async with running(settings) as live:
        await more_steps(live, 1)
        held = os.open(settings.run_dir, os.O_RDONLY)
        await asyncio.to_thread(fcntl.flock, held, fcntl.LOCK_EX)  # as an archiver does that hangs in a write

        async def stopped() -> bool:
            rollouts = await live.ledger.peers(Role.ROLLOUT)
            return any("archive_behind" in what for rollout in rollouts for what in rollout.info["waits"])

        async with asyncio.timeout(400):
            while not await stopped():  # noqa: ASYNC110 (the ledger is asked)
                await asyncio.sleep(0.02)
        await reached(live.ledger, lambda status: status.active < settings.bound.groups_per_step)
        waiting = len(await live.ledger.events(0, 10**6))
        assert limit < waiting <= limit + 4 * most
        issued = (await live.ledger.status()).issued
        os.close(held)
        await reached(live.ledger, lambda status: status.issued > issued)
        await more_steps(live, 2)
        await drained(live)
    assert verify(settings.run_dir / FILE).violations == []


async def test_a_halted_run_continues_in_place_after_its_cause_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "9=", "answer": "9"}\n' * 4)
    overrides = (
        "bound.max_attempts=1", "bound.drop_window=4", "bound.drop_share=1.0", "prompts.held_out=0",
        f'prompts.path="{tmp_path}/prompts.jsonl"',
    )  # fmt: skip
    broken = dry(tmp_path, *overrides, 'reward.verifiers=[{name="tests.integration.failing_verifier"}]')
    with pytest.raises(ExceptionGroup) as ended:
        await until_halted(broken)
    assert str(leaf(ended.value)) == "halted: attempts"
    async with running(dry(tmp_path, *overrides)) as live:
        await more_steps(live, 2)
        await drained(live)
    assert verify(tmp_path / FILE).violations == []
    kinds = [event["event"] for event in log_of(broken)]
    assert kinds.index("halt") < kinds.index("unhalt") < kinds.index("commit")


async def until_halted(settings: Settings) -> None:
    """Run until somebody says that the run has halted, which ends its process."""
    async with running(settings) as live, asyncio.timeout(400):
        await live.trained.wait()


def leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def on_server(settings: Settings, url: str) -> Settings:
    return dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))


async def dump(url: str, run: str) -> dict[bytes, bytes]:
    """Every key of a run and what it holds."""
    async with aioredis.Redis.from_url(url) as client:
        keys = [key async for key in client.scan_iter(match=f"{{tether:{run}}}:*")]
        return {key: await client.dump(key) or b"" for key in keys if b":request" not in key}


@slow_unless_changed("services/ledger/", "services/ingest/", "services/runtime/")
async def test_two_runs_on_one_server_do_not_change_each_other(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "redis")
    url = await server.start()
    try:
        one, two = [on_server(dry(tmp_path / name, f"run.name={name}"), url) for name in ("one", "two")]
        async with running(two) as second:
            async with running(one) as first:
                await more_steps(first, 3)
                await more_steps(second, 3)
                await drained(first)
                assert not (await second.ledger.status()).draining
            before = await dump(url, "one")
            await more_steps(second, 3)
            assert await dump(url, "one") == before
            await drained(second)
        async with aioredis.Redis.from_url(url) as client:
            tags = Counter(key.split(b":", 2)[1] for key in await client.keys("*"))
    finally:
        await server.stop()
    assert set(tags) == {b"one}", b"two}"}
    engines = []
    for settings in (one, two):
        assert verify(settings.run_dir / FILE).violations == []
        engines.append({event["engine"] for event in log_of(settings) if event["event"] == "lease"})
    assert engines[0].isdisjoint(engines[1])


def tether(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    result = tether_here(*arguments)
    return result.returncode, result.stdout, result.stderr


def names(run_dir: Path) -> set[str]:
    """The services that live, by name."""
    code, out, _ = tether("status", run_dir, "--json")
    return {item["name"] for item in json.loads(out)["processes"]} if code == 0 else set()


@slow_unless_changed(*LAUNCHER, "services/tools/")
@pytest.mark.xdist_group("command")
@pytest.mark.timeout(900)
def test_a_run_is_scaled_and_drained_by_commands(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = [word for override in (*CALM, "run.name=scaletest") for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/stragglers.toml")
    alone = {"ingest", "trainer", "monitor", "rollout.0", "reward.0"}
    with tether_up(config, "--run-dir", str(run_dir), *options, output=tmp_path / "up.log") as up:
        until(lambda: len(read_steps(run_dir / "metrics.jsonl")) >= 2, seconds=180, what="step 2")
        assert tether("scale", run_dir, "rollouts=3", "rewards=2") == (0, "rollouts 3, rewards 2\n", "")
        until(
            lambda: names(run_dir) == alone | {"rollout.1", "rollout.2", "reward.1"},
            seconds=300,
            what="more workers",
        )
        assert tether("scale", run_dir, "rollouts=1", "rewards=1")[0] == 0
        until(lambda: names(run_dir) == alone, seconds=300, what="fewer workers")
        steps = len(read_steps(run_dir / "metrics.jsonl"))
        until(
            lambda: len(read_steps(run_dir / "metrics.jsonl")) > steps + 2,
            seconds=120,
            what="steps with fewer workers",
        )
        code, out, _ = tether("drain", run_dir)
        assert (code, out) == (
            0,
            "draining: no more leases are granted; the run ends with what is in flight\n",
        )
        assert up.wait(300) == 0, (tmp_path / "up.log").read_text()
    said = (tmp_path / "up.log").read_text()
    assert "the run was drained after" in said
    assert processes_of(run_dir) == []
    logs = [path.read_text() for path in (run_dir / "logs").glob("*.log")]
    assert not any("process.failed" in log for log in logs)
    assert tether("verify", run_dir)[0] == 0
    code, out, _ = tether("replay", run_dir, "--step", 1)
    assert code == 0, out
    assert "equal yes" in out
    assert json.loads(tether("replay", run_dir, "--step", 1, "--train", "--json")[1])["train"][
        "weights_equal"
    ]
    code, out, _ = tether("trace", run_dir, 3)
    assert (code, out.splitlines()[0].split(" after ")[0]) == (0, "group 3: trained")
    assert json.loads(tether("trace", run_dir, 3, "--json")[1])[0]["event"] == "lease"
    wrong: tuple[tuple[tuple[object, ...], str], ...] = (
        (("scale", run_dir, "rollouts=2"), "run scaletest is not running; it was drained"),
        (("trace", run_dir, 10**9), f"group {10**9} is not in the log"),
        (("replay", run_dir, "--step", 10**9), f"step {10**9} is not in the log"),
        (("trace", tmp_path / "none", 1), "no event log"),
        (("replay", tmp_path / "none", "--step", 1), "no run in"),
    )
    for arguments, error in wrong:
        code, out, err = tether(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"tether: {error}")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("rollouts", "write rollouts=N or rewards=N"),
        ("trainers=2", "write rollouts=N"),
        ("rewards=-1", "write"),
        ("rollouts=99999", "not between"),
    ],
)
def test_wrong_counts_are_named(tmp_path: Path, word: str, says: str) -> None:
    code, _, err = tether("scale", tmp_path, word)
    assert code == 2
    assert err.startswith(f"tether: {word!r}: ")
    assert says in err
