"""A ledger whose server lost acknowledged writes, or everything, is rebuilt from disk, and the run
continues."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log import archiver as log
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import audit, processes_of, tether_up, until
from tests.integration.loop import ROOT, running, settings_for
from trainer.storage.spool import Spool

OVERRIDES = (
    "engine.straggler_share=0",
    "engine.seconds_per_token=0.01",
    "trainer.checkpoint_every=6",
    "trainer.step_s=0.02",
    "monitor.enabled=false",
)
B = 8


class Server:
    """A user's own server: `tether up` does not start it again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server = EmbeddedServer(directory)
        self.url = asyncio.run(self._server.start())

    def save(self) -> None:
        """Keep a copy of what is on disk now."""
        shutil.copytree(self.directory / "appendonlydir", self.directory / "kept")

    def lose(self) -> None:
        """Crash, and come back with what was saved."""
        self.kill()
        shutil.rmtree(self.directory / "appendonlydir")
        shutil.move(self.directory / "kept", self.directory / "appendonlydir")
        self.restart()

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        until(lambda: not self._server.running(), seconds=60, what="the end of the server")

    def restart(self) -> None:
        self._server = EmbeddedServer(self.directory)
        assert asyncio.run(self._server.start()) == self.url

    def command(self, *words: str) -> Any:
        with redis.Redis.from_url(self.url) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        asyncio.run(self._server.stop())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "redis")
    yield made
    made.stop()


def arguments(run_dir: Path, steps: int) -> list[str]:
    sets = [word for override in OVERRIDES for word in ("--set", override)]
    return [
        str(ROOT / "deploy/configs/stragglers.toml"),
        "--steps",
        str(steps),
        "--rollouts",
        "2",
        "--run-dir",
        str(run_dir),
        *sets,
    ]


def reaches(run_dir: Path, step: int, up: "subprocess.Popen[bytes]") -> None:
    """Wait until a step is made, or the run has ended."""
    until(
        lambda: up.poll() is not None or len(read_steps(run_dir / "metrics.jsonl")) >= step,
        seconds=180,
        what=f"step {step}",
    )
    assert up.poll() is None, f"the run ended before step {step}"


def events(run_dir: Path) -> list[dict[str, Any]]:
    """What is archived: none before the first event, and no line that is still being written."""
    path = run_dir / log.FILE
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def check(run_dir: Path, steps: int, rebuilds: int, output: Path) -> None:
    """All steps are made once, on one path, of groups that are trained once."""
    text = output.read_text()
    assert [step["step"] for step in read_steps(run_dir / "metrics.jsonl")] == list(range(steps)), text
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"], result["trained"]) == (
        0,
        [],
        steps,
        steps * B,
    ), text
    log = events(run_dir)
    assert sum(event["event"] == "rebuild" for event in log) == rebuilds
    commits = [told for event in log for told in (event, *event.get("told", ())) if told["event"] == "commit"]
    assert Counter(commit["step"] for commit in commits) == Counter(range(steps))
    groups = [group for commit in commits for group in commit["groups"]]
    assert len(groups) == len(set(groups)) == steps * B
    assert processes_of(run_dir) == []


@slow_unless_changed("services/ledger/", "services/ledger_recovery/", "services/ingest/")
def test_a_run_goes_on_when_its_ledger_falls_back_and_when_it_is_emptied(
    tmp_path: Path, server: Server
) -> None:
    run_dir, output, steps = tmp_path / "run", tmp_path / "up.log", 28
    with tether_up(*arguments(run_dir, steps), output=output, TETHER_REDIS_URL=server.url) as up:
        reaches(run_dir, 4, up)
        server.save()
        reaches(run_dir, 10, up)
        server.lose()
        reaches(run_dir, 18, up)
        server.command("FLUSHALL")
        assert up.wait(400) == 0, output.read_text()
    check(run_dir, steps, 2, output)
    assert len({step["epoch"] for step in read_steps(run_dir / "metrics.jsonl")}) == 3


async def test_the_journal_is_kept_while_the_archive_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints cover steps that the archive does not know yet: the journal alone can tell a new ledger of
    them."""
    monkeypatch.setattr(log, "LOCK_TIMEOUT_S", 0.05)
    overrides = (*OVERRIDES, "run.steps=1000", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=1")
    async with asyncio.timeout(400), running(settings_for(tmp_path, "stragglers.toml", *overrides)) as live:

        async def made(steps: int) -> None:
            version = (await live.ledger.head()).version
            while (await live.ledger.head()).version < version + steps:  # noqa: ASYNC110 (the ledger tells nobody)
                await asyncio.sleep(0.01)

        while not any(event["event"] == "commit" for event in events(tmp_path)):  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(0.01)
        held = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            archived = events(tmp_path)[-1]["seq"]
            await made(4)
            spool = Spool(tmp_path / "spool.sqlite", read_only=True)
            oldest = min(entry.ledger_sequence for entry in spool.journal())
            spool.close()
        finally:
            os.close(held)
    assert oldest <= archived


@pytest.mark.slow
def test_a_run_is_continued_on_an_empty_server(tmp_path: Path, server: Server) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    for steps in (7, 13):
        with tether_up(*arguments(run_dir, steps), output=output, TETHER_REDIS_URL=server.url) as up:
            assert up.wait(400) == 0, output.read_text()
        server.command("FLUSHALL")
    check(run_dir, 13, 1, output)
