"""Tests how a run is created, and continued with other settings, on a ledger."""

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.staleness import Bound, Policy
from services.ledger.interface import RunSpec
from services.runtime.start_run import start_or_resume
from services.settings.load import FILE, load_settings, run_settings
from services.settings.resume import EARLIER, earlier_name
from services.settings.sections import Settings
from tests.contracts.ledger_rig import Driver, MemoryRig

B = 2


def settings_of(run_dir: Path, *overrides: str) -> Settings:
    values = (
        "run.steps=10",
        "bound.max_staleness=1",
        f"bound.groups_per_step={B}",
        "bound.staleness_policy=wait",
    )
    return load_settings(None, [f"run.dir={run_dir}", *values, *overrides], environ={})


def spec_of(settings: Settings, fingerprint: str = "f") -> RunSpec:
    bound = settings.bound
    return RunSpec(
        settings.run.name, fingerprint, None, settings.run.steps, bound.bound, bound.max_attempts,
        bound.drop_share, bound.drop_window,
    )  # fmt: skip


class Place:
    """A run directory and a ledger in memory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.driver = Driver(MemoryRig())
        self.ledger = self.driver.ledger

    async def start(self, *overrides: str, fingerprint: str = "f") -> list[str]:
        settings = settings_of(self.run_dir, *overrides)
        return list(await start_or_resume(self.ledger, settings, spec_of(settings, fingerprint)))

    async def refused(self, *overrides: str, fingerprint: str = "f") -> str:
        """Start the run, check that the refusal changed nothing, and return what it says."""
        before = (await self.ledger.status(), (self.run_dir / FILE).read_bytes())
        with pytest.raises(SettingsError) as refusal:
            await self.start(*overrides, fingerprint=fingerprint)
        assert (await self.ledger.status(), (self.run_dir / FILE).read_bytes()) == before
        return str(refusal.value)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_new_run_says_its_bound(place: Place) -> None:
    assert await place.start() == [f"run run in {place.run_dir}: 10 steps, E=1, B=2, wait"]
    assert (place.run_dir / FILE).is_file()


async def test_a_run_that_is_started_again_as_it_was_lists_nothing(place: Place) -> None:
    await place.start()
    assert await place.start() == [f"run run in {place.run_dir}: 10 steps, E=1, B=2, wait"]


async def test_the_bound_of_the_settings_is_in_force_and_listed(place: Place) -> None:
    await place.start()
    lines = await place.start("bound.max_staleness=3", "bound.groups_per_step=4", "run.steps=20")
    assert lines == [
        f"run run in {place.run_dir}: 20 steps, E=3, B=4, wait",
        "changed since the last start: bound.max_staleness 1 -> 3, bound.groups_per_step 2 -> 4, "
        "run.steps 10 -> 20",
    ]
    status = await place.ledger.status()
    assert (status.bound, status.pending, status.steps) == (Bound(3, 4, Policy.WAIT), None, 20)


async def test_a_bound_that_does_not_hold_yet_is_pending(place: Place) -> None:
    await place.start()
    await place.driver.ledger.claim("e1")
    await place.driver.ledger.resume("e1", 0, 0)
    await place.driver.ledger.applied("eng", "e1", 0)
    for _ in range(4):
        await place.driver.lease()
    (line, changed) = await place.start("bound.groups_per_step=1")
    assert line.endswith("10 steps, E=1, B=2, wait; pending until rule F holds with it: E=1, B=1, wait")
    assert changed == "changed since the last start: bound.groups_per_step 2 -> 1"
    (line, changed) = await place.start("bound.groups_per_step=1")
    assert line.endswith("pending until rule F holds with it: E=1, B=1, wait")


async def test_setting_changed_during_a_run_lasts_until_the_next_start(place: Place) -> None:
    await place.start()
    await place.ledger.set_bound(max_staleness=4)
    line, changed = await place.start()
    assert "E=1" in line
    assert changed == "changed since the last start: bound.max_staleness 4 -> 1"


async def test_other_changes_are_listed_once(place: Place) -> None:
    await place.start()
    changed = ["optimizer.lr=5e-6", "bound.max_attempts=7"]
    assert (await place.start(*changed))[1:] == [
        "changed since the last start: bound.max_attempts 5 -> 7, optimizer.lr 1e-05 -> 5e-06"
    ]
    assert (await place.start(*changed))[1:] == []


async def test_settings_that_decided_earlier_steps_are_kept(place: Place) -> None:
    await place.start()
    end = (await place.ledger.status()).sequence
    await place.start("bound.max_attempts=7")
    assert list(place.run_dir.glob(EARLIER)) == []
    await place.start("bound.max_attempts=7", "optimizer.lr=5e-6")
    kept = earlier_name(place.run_dir, end)
    assert run_settings(place.run_dir, name=kept) == settings_of(place.run_dir, "bound.max_attempts=7")
    await place.start("optimizer.lr=4e-6")  # without an event in between
    assert earlier_name(place.run_dir, end) == kept
    assert run_settings(place.run_dir, name=kept).optimizer.lr == Settings().optimizer.lr
    assert earlier_name(place.run_dir, end + 100) == FILE


async def test_other_prompts_are_refused_with_both_fingerprints(place: Place) -> None:
    await place.start()
    told = await place.refused("optimizer.lr=5e-6", fingerprint="g")
    assert "run run was created with prompts f (without end)" in told
    assert "cannot change to prompts g (without end): give it the old prompts" in told


async def test_a_fixed_setting_is_refused(place: Place) -> None:
    await place.start("trainer.seed=1")
    assert "trainer.seed is 1 in the run and 2 now" in await place.refused(
        "trainer.seed=2", "bound.max_staleness=2"
    )


async def test_steps_that_are_made_cannot_be_taken_back(place: Place) -> None:
    await place.start()
    await one_step(place)
    assert "run.steps: 0" in str(await refused_steps(place))


async def refused_steps(place: Place) -> SettingsError:
    settings = settings_of(place.run_dir)
    with pytest.raises(SettingsError) as refusal:
        await start_or_resume(place.ledger, settings, replace(spec_of(settings), steps=0))
    return refusal.value


async def one_step(place: Place) -> None:
    """Make one step on the ledger; no checkpoint covers it."""
    ledger = place.ledger
    await ledger.claim("e1")
    await ledger.resume("e1", 0, 0)
    await ledger.applied("eng", "e1", 0)
    await place.driver.scored(B)
    await place.driver.commit(await ledger.take("e1"))


async def test_steps_without_a_checkpoint_that_the_change_concerns_are_named(place: Place) -> None:
    await place.start()
    await one_step(place)
    lines = await place.start("optimizer.lr=5e-6")
    assert lines[0].endswith("E=1, B=2, wait, resumes at version 1")
    assert lines[2].startswith("steps 0 to 0 have no checkpoint: where they come out different now")
    assert len(await place.start("optimizer.lr=5e-6", "services.rewards=2")) == 2


async def test_samples_that_wait_to_be_trained_keep_their_temperature(place: Place) -> None:
    await place.start()
    await one_step(place)
    await place.ledger.applied("eng", "e1", 1)
    await place.driver.scored(1)
    told = await place.refused("sampling.temperature=0.7")
    assert "setting sampling.temperature is 1.0 in the run and 0.7 now" in told
    assert "1 groups wait" in told
