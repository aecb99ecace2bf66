"""The disk of the versions is full, and the trainer that waits for room is fenced, or stopped."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.errors import TetherError
from protocol.topics import Role
from services.settings.sections import Settings
from tests.changes import WEIGHTS, slow_unless_changed
from tests.integration.loop import LiveRun, run_to_end, running, settings_for
from tests.small_disks import small_disk

STEPS = 8


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4 << 10) as path:
        yield path


@pytest.fixture
def settings(tmp_path: Path, disk: Path) -> Settings:
    words = "engine.straggler_share=0", "weights.transport=disk", f"weights.directory={disk}"
    return settings_for(tmp_path / "run", "stragglers.toml", f"run.steps={STEPS}", *words)


async def fill(live: LiveRun, disk: Path) -> None:
    """Have the trainer wait for room for a version, after the second step."""
    while (await live.ledger.status()).version < 2:  # noqa: ASYNC110 (the ledger tells nobody)
        await asyncio.sleep(0.02)
    (trainer,) = live.processes[Role.TRAINER]
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        while f"room: the disk of {disk} is full" not in trainer.waits:
            with suppress(OSError):  # old versions are removed meanwhile
                ballast.write(bytes(1 << 16))
            await asyncio.sleep(0.002)


async def test_a_trainer_that_is_fenced_meanwhile_ends_and_says_so(settings: Settings, disk: Path) -> None:
    before: set[str] = set()

    async def fence() -> None:
        async with asyncio.timeout(120), running(settings) as live:
            await fill(live, disk)
            before.update(path.name for path in disk.iterdir())
            await live.ledger.claim("another")
            await live.trained.wait()

    with pytest.raises(ExceptionGroup) as ended:
        await fence()
    assert ended.group_contains(TetherError, match="^another trainer has taken over run stragglers; this one")
    assert {path.name for path in disk.iterdir()} == before


@slow_unless_changed(*WEIGHTS, "services/trainer/", "trainer/storage/")
async def test_a_stop_meanwhile_is_an_ordinary_one_and_the_run_resumes(
    settings: Settings, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(120), running(settings) as live:
        await fill(live, disk)
    assert "run.stopped_without_room error=" in caplog.text
    assert live.trained.is_set()
    (disk / "ballast").unlink()
    finished = await run_to_end(settings)
    assert [step["step"] for step in finished.steps] == list(range(STEPS))
    assert finished.audit.violations == []
    assert all(event["continued"] for event in finished.events if event["event"] == "resume")
