"""Bits of the spool are flipped, the spool is deleted, and its disk is full, while a run is on."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import FILE
from services.run_record.steps import read_steps
from tests.integration.command import audit, ledger_of, pids, processes_of, tether_up, until
from tests.integration.loop import ROOT
from tests.small_disks import small_disk
from trainer.storage.spool import Spool

STEPS = 12
OVERRIDES = (
    "run.name=demo",
    "engine.straggler_share=0",
    "engine.seconds_per_token=0.02",
    "trainer.checkpoint_every=4",
    "trainer.step_s=0.1",
    "bound.groups_per_step=4",
    "bound.max_staleness=3",
    "monitor.enabled=false",
    "services.restarts=1",
)


def arguments(run_dir: Path, steps: int = STEPS) -> list[str]:
    words = [str(ROOT / "deploy/configs/stragglers.toml"), "--steps", str(steps), "--run-dir", str(run_dir)]
    return words + [word for override in OVERRIDES for word in ("--set", override)]


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / FILE
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def reaches(run_dir: Path, step: int, up: "subprocess.Popen[bytes]") -> None:
    until(
        lambda: up.poll() is not None or len(read_steps(run_dir / "metrics.jsonl")) >= step,
        seconds=120,
        what=f"step {step}",
    )
    assert up.poll() is None


def last_event(run_dir: Path) -> int:
    """The number of the ledger's last event, which the log does not have at once."""

    async def look() -> int:
        async with ledger_of(run_dir) as ledger:
            return (await ledger.head()).sequence

    return asyncio.run(look())


def waiting_records(run_dir: Path) -> list[tuple[int, str]]:
    """Groups, with their leases, that were accepted and not taken; none before the log has every event."""
    last, log = last_event(run_dir), events(run_dir)
    if log[-1]["seq"] < last:
        return []
    accepted: dict[int, str] = {}
    for event in log:
        if event["event"] == "accept":
            accepted[event["group"]] = event["token"]
        elif event["event"] == "take":
            for group in event["groups"]:
                accepted.pop(group, None)
    return sorted(accepted.items())


def flipped(payload: bytes, kind: int) -> bytes:
    """A record with one other bit: of a token, in a token's sign, or in a log-probability's sign."""
    message = decode_payload(payload)
    assert isinstance(message, ScoredRollout)
    values, byte, bit = (
        (message.rollout.tokens, 0, 0x01),
        (message.rollout.tokens, 3, 0x80),
        (message.rollout.logprobs, 3, 0x80),
    )[kind % 3]
    damaged = bytearray(payload)
    damaged[payload.index(bytes(values.data)) + byte] ^= bit
    return bytes(damaged)


@pytest.mark.slow
def test_damaged_groups_are_generated_again_and_the_trainer_lives(tmp_path: Path) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    with tether_up(*arguments(run_dir), output=output) as up:
        reaches(run_dir, 2, up)
        trainer = pids(run_dir)["trainer"]
        os.kill(trainer, signal.SIGSTOP)
        try:
            keys = until(
                lambda: len(found := waiting_records(run_dir)) >= 4 and found[:3], seconds=60, what="4 groups"
            )
            with (
                closing(Spool(run_dir / "spool.sqlite", read_only=True)) as spool,
                closing(sqlite3.connect(run_dir / "spool.sqlite", timeout=30)) as connection,
            ):
                for kind, (key, payload) in enumerate(zip(keys, spool.get_many(keys), strict=True)):
                    row = (flipped(payload, kind), *key)
                    connection.execute("UPDATE records SET payload = ? WHERE grp = ? AND token = ?", row)
                connection.commit()
                named = {(item.group, item.what) for item in spool.damaged()}
            assert named == {(g, f"the record of group {g} under lease {token}") for g, token in keys}
        finally:
            os.kill(trainer, signal.SIGCONT)
        assert up.wait(200) == 0, output.read_text()
    log = events(run_dir)
    lost = {(event["group"], event["token"]) for event in log if event["event"] == "lost"}
    assert lost == set(keys)
    accepted: dict[int, str] = {}
    trained: set[tuple[int, str]] = set()
    for event in log:
        if event["event"] == "accept":
            accepted[event["group"]] = event["token"]
        elif event["event"] == "commit":
            trained |= {(int(group), accepted[int(group)]) for group in event["groups"]}
    assert not trained & lost
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], STEPS)
    told = (run_dir / "logs/trainer.log").read_text()
    for group, token in keys:
        assert f"group.lost group {group}: its record under lease {token} does not match its checksum" in told
    assert "restarts" not in output.read_text()


@pytest.mark.slow
def test_a_spool_that_is_deleted_ends_the_run_which_can_be_continued(tmp_path: Path) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    with tether_up(*arguments(run_dir), output=output) as up:
        reaches(run_dir, 2, up)
        for path in run_dir.glob("spool.sqlite*"):
            path.unlink()
        assert up.wait(120) == 2, output.read_text()
    assert f"the spool {run_dir}/spool.sqlite was deleted or replaced" in output.read_text()
    assert processes_of(run_dir) == []
    assert not (run_dir / "spool.sqlite").exists()
    with tether_up(*arguments(run_dir), output=output) as up:
        assert up.wait(200) == 0, output.read_text()
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], STEPS)


def waits_of(place: Path, name: str) -> list[str]:
    """What a service waits for, as the ledger in a place says."""

    async def look() -> list[str]:
        async with ledger_of(place) as ledger:
            peers = await ledger.peers()
        return [what for peer in peers if peer.info["name"] == name for what in peer.info["waits"]]

    return asyncio.run(look())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 24 << 10) as path:
        yield path


def fill(disk: Path) -> None:
    """Leave no room on a disk until the file `ballast` is deleted."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(1 << 12))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_a_full_disk_stops_the_run_until_there_is_room(tmp_path: Path, disk: Path, transport: str) -> None:
    run_dir, output, place = disk / "run", tmp_path / "up.log", tmp_path / "server"
    words = [*arguments(run_dir), "--set", f"weights.transport={transport}"]
    server = EmbeddedServer(place / "ledger")  # on another disk
    url = asyncio.run(server.start())
    try:
        with tether_up(*words, output=output, TETHER_REDIS_URL=url) as up:
            reaches(run_dir, 2, up)
            before = pids(place)
            fill(disk)
            full = f"the disk of {run_dir} is full"
            for name in ("trainer", "ingest"):
                until(lambda name=name: f"room: {full}" in waits_of(place, name), seconds=60, what=name)
            until(lambda: full in output.read_text(), seconds=10, what="a word of it")
            after = pids(place)
            assert {name: after[name] for name in ("trainer", "ingest")}.items() <= before.items()
            (disk / "ballast").unlink()
            assert up.wait(200) == 0, output.read_text()
        text = output.read_text()
        assert "has room again" in text
        assert "restarts" not in text
        result = audit(run_dir)
        assert (result["code"], result["violations"], result["steps"]) == (0, [], STEPS)
        assert [step["step"] for step in read_steps(run_dir / "metrics.jsonl")] == list(range(STEPS))
    finally:
        asyncio.run(server.stop())


@pytest.mark.slow
def test_a_stop_on_a_full_disk_kills_nothing_and_the_run_can_be_continued(tmp_path: Path, disk: Path) -> None:
    run_dir, output, place = disk / "run", tmp_path / "up.log", tmp_path / "server"
    server = EmbeddedServer(place / "ledger")  # on another disk
    url = asyncio.run(server.start())
    try:
        with tether_up(*arguments(run_dir), output=output, TETHER_REDIS_URL=url) as up:
            reaches(run_dir, 2, up)
            fill(disk)
            full = f"the disk of {run_dir} is full"
            until(lambda: f"room: {full}" in waits_of(place, "trainer"), seconds=60, what="a wait")
            up.terminate()
            assert up.wait(200) == 2, output.read_text()
        text = output.read_text()
        assert "drain_timeout name=trainer" not in text
        assert f"{full}: make room, then start the same command again" in text
        assert f"No space left on device: '{run_dir / FILE}'" in text
        (disk / "ballast").unlink()
        with tether_up(*arguments(run_dir), output=output, TETHER_REDIS_URL=url) as up:
            assert up.wait(200) == 0, output.read_text()
        result = audit(run_dir)
        assert (result["code"], result["violations"], result["steps"]) == (0, [], STEPS)
        assert [step["step"] for step in read_steps(run_dir / "metrics.jsonl")] == list(range(STEPS))
    finally:
        asyncio.run(server.stop())
