"""Tests `tether scale` against a running fleet: real child processes, without a run around them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.host.file_lock import try_lock
from protocol.topics import Role
from services.launcher.fleet import Fleet
from services.launcher.scaling import FILE, is_up, parse_counts, request_scale, run_lock, scale_loop
from services.run_record.end import LOCK
from tests.integration.loop import settings_for


async def never() -> bool:
    return False


@asynccontextmanager
async def up(run_dir: Path) -> AsyncIterator[Fleet]:
    """Run a fleet without workers that applies requests. Its services fail: there is no ledger."""
    settings = settings_for(
        run_dir, "stragglers.toml", "services.rollouts=0", "services.rewards=0", "services.restarts=1000"
    )
    (run_dir / "logs").mkdir(parents=True)
    fleet = Fleet(settings, "redis://127.0.0.1:1/0", never)
    with run_lock(run_dir):
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            fleet._tasks = tasks  # without `start`: the trainer and the ingest stay out of it
            applying = tasks.create_task(scale_loop(run_dir, fleet))
            yield fleet
            applying.cancel()
            await fleet.stop()


async def test_a_running_fleet_grows_and_shrinks_on_request(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with up(run_dir) as fleet:
        await asyncio.to_thread(request_scale, run_dir, {Role.ROLLOUT: 2, Role.REWARD: 1})
        assert [child.spec.name for child in fleet.children[Role.ROLLOUT]] == ["rollout.0", "rollout.1"]
        assert [child.spec.name for child in fleet.children[Role.REWARD]] == ["reward.0"]
        retired = fleet.children[Role.ROLLOUT][1]
        await asyncio.to_thread(request_scale, run_dir, {Role.ROLLOUT: 1})
        assert [child.spec.name for child in fleet.children[Role.ROLLOUT]] == ["rollout.0"]
        assert retired.pid is None
        assert not (run_dir / FILE).exists()
    assert all(child.pid is None for group in fleet.children.values() for child in group)
    assert not is_up(run_dir)


@pytest.mark.parametrize("text", ["{", "7", "[7]", '["trainers=0"]', '{"rollout": 1}', '["rollouts=-1"]'])
async def test_a_request_that_is_none_changes_nothing(tmp_path: Path, text: str) -> None:
    run_dir = tmp_path / "run"
    async with up(run_dir) as fleet:
        before = {role: len(group) for role, group in fleet.children.items()}
        (run_dir / FILE).write_text(text)
        while (run_dir / FILE).exists():  # noqa: ASYNC110 (a file)
            await asyncio.sleep(0.02)
        assert {role: len(group) for role, group in fleet.children.items()} == before


async def test_a_directory_in_place_of_the_request_is_named_and_later_requests_are_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / FILE).mkdir(parents=True)
    async with up(run_dir) as fleet:
        while str(run_dir / FILE) not in caplog.text:  # noqa: ASYNC110 (a log)
            await asyncio.sleep(0.02)
        (run_dir / FILE).rmdir()
        await asyncio.to_thread(request_scale, run_dir, {Role.REWARD: 1})
        assert [child.spec.name for child in fleet.children[Role.REWARD]] == ["reward.0"]


async def test_two_requests_at_once_and_one_to_nobody_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no `tether up` is running"):
        request_scale(tmp_path, {Role.REWARD: 1})
    with run_lock(tmp_path):
        assert is_up(tmp_path)
        (tmp_path / FILE).write_text(json.dumps(["rewards=1"]))
        with pytest.raises(SettingsError, match="under way"):
            request_scale(tmp_path, {Role.REWARD: 1})
        with pytest.raises(SettingsError, match="another `tether up`"), run_lock(tmp_path):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", FILE]


def test_a_question_whether_a_run_is_up_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    asking = (tmp_path / LOCK).open()
    assert try_lock(asking.fileno(), exclusive=False)  # as `is_up` does, for a moment
    answered = threading.Timer(0.02, asking.close)
    answered.start()
    with run_lock(tmp_path):
        assert is_up(tmp_path)
    answered.join()


@pytest.mark.parametrize(("drain_s", "rollout_s", "reward_s"), [(10, 20, 15), (60, 70, 65), (0, 20, 15)])
def test_workers_have_the_time_to_drain_that_was_set(
    tmp_path: Path, drain_s: int, rollout_s: int, reward_s: int
) -> None:
    settings = settings_for(tmp_path, "stragglers.toml", f"rollout.drain_s={drain_s}")
    fleet = Fleet(settings, "redis://127.0.0.1:1/0", never)
    assert (fleet.drain_s(Role.ROLLOUT), fleet.drain_s(Role.REWARD)) == (rollout_s, reward_s)


def test_counts_are_read_as_they_are_written() -> None:
    assert parse_counts(["rollouts=3", "rewards=0"]) == {Role.ROLLOUT: 3, Role.REWARD: 0}
    with pytest.raises(SettingsError, match="'rollouts=20000': 20000 is not between 0 and 10000"):
        parse_counts(["rollouts=20000"])
