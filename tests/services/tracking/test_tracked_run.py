"""Tests that a tracker gets every step once, across restarts and failures of its library."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.messages import StepReport
from services.run_record.steps import StepLog
from services.settings.load import dump_settings, load_settings
from services.settings.sections import Settings
from services.tracking.base import TrackedPoint, TrackerOptions
from services.tracking.state import read_state
from services.tracking.tracked_run import CHUNK_BYTES, TrackedRun


class Library:
    """A tracking service that lives longer than its trackers, and may fail."""

    def __init__(self) -> None:
        self.points: list[TrackedPoint] = []
        self.opened: list[TrackerOptions] = []
        self.failure: BaseException | None = None
        self.closed = 0

    def open(self, kind: str, options: TrackerOptions) -> "LibraryRun":
        if self.failure:
            raise self.failure
        self.opened.append(options)
        return LibraryRun(self, options.run_id or f"id-{len(self.opened)}")

    @property
    def versions(self) -> list[int]:
        return [point.version for point in self.points]


class LibraryRun:
    """One opening of the run."""

    def __init__(self, library: Library, run_id: str) -> None:
        self._library = library
        self.run_id = run_id
        self.url = f"lib://{run_id}"

    def log(self, points: Sequence[TrackedPoint]) -> None:
        if self._library.failure:
            raise self._library.failure
        self._library.points += points

    def close(self) -> None:
        self._library.closed += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = load_settings(None, [f"run.dir={tmp_path}", "tracking.kind=wandb", "tracking.tags=['a']"], {})
    dump_settings(settings, tmp_path / "settings.json")
    return settings


def make_steps(settings: Settings, steps: range, epoch: str = "e1") -> None:
    log = StepLog(settings.run_dir / "metrics.jsonl")
    for step in steps:
        log.append(StepReport(step=step, version=step + 1, epoch=epoch, reward_mean=0.5))


def tracked(settings: Settings, library: Library, clock: Clock | None = None) -> TrackedRun:
    return TrackedRun("wandb", settings, library.open, clock or Clock())


def test_the_end_of_a_run_does_not_wait_for_its_event_log(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tracking.sample_table.time.sleep", pytest.fail)
    library = Library()
    make_steps(settings, range(3))
    tracked(replace(settings, tracking=replace(settings.tracking, samples_every=1)), library).finish()
    assert library.versions == [1, 2, 3]


def test_steps_are_sent_once_and_the_state_says_how_far(settings: Settings) -> None:
    library, run = Library(), None
    run = tracked(settings, library)
    assert run.advance() is False
    assert library.opened == []  # nothing to say yet
    make_steps(settings, range(3))
    run.advance()
    run.advance()
    make_steps(settings, range(3, 5))
    run.finish()
    assert library.versions == [1, 2, 3, 4, 5]
    assert [point.ordinal for point in library.points] == list(range(5))
    state = read_state(settings.run_dir, "wandb")
    assert (state.run_id, state.url, state.sent, state.version) == ("id-1", "lib://id-1", 5, 5)
    assert state.offsets == {"metrics.jsonl": (settings.run_dir / "metrics.jsonl").stat().st_size}
    assert library.closed == 1
    (options,) = library.opened
    assert (options.project, options.name, options.tags, options.next_version) == (
        "tether",
        "run",
        ("a",),
        None,
    )
    assert options.settings["run.steps"] == 100
    assert not [name for name in options.settings if name.startswith(("ledger.", "bus.", "monitor."))]


def test_a_new_process_continues_where_the_last_one_ended(settings: Settings) -> None:
    library = Library()
    make_steps(settings, range(2))
    tracked(settings, library).advance()  # and is killed
    make_steps(settings, range(2, 4))
    tracked(settings, library).finish()
    assert library.versions == [1, 2, 3, 4]
    assert [(item.run_id, item.next_version) for item in library.opened] == [("", None), ("id-1", 3)]


@pytest.mark.parametrize("failure", [RuntimeError("no network"), ImportError("no module"), SystemExit(1)])
def test_a_library_that_fails_is_tried_again_later(settings: Settings, failure: BaseException) -> None:
    library, clock = Library(), Clock()
    run = tracked(settings, library, clock)
    make_steps(settings, range(2))
    run.advance()
    library.failure = failure
    make_steps(settings, range(2, 4))
    run.advance()
    assert type(failure).__name__ in read_state(settings.run_dir, "wandb").problem
    library.failure = None
    run.advance()  # too early
    assert library.versions == [1, 2]
    clock.now = 6.0
    run.advance()
    assert library.versions == [1, 2, 3, 4]
    assert read_state(settings.run_dir, "wandb").problem == ""


def test_failures_are_tried_less_and_less_often(settings: Settings) -> None:
    library, clock = Library(), Clock()
    library.failure = RuntimeError("down")
    run = tracked(settings, library, clock)
    make_steps(settings, range(1))
    tries, errors = 0, []
    for second in range(4000):
        clock.now = float(second)
        before = run._retry_at
        run.advance()
        if run._retry_at != before:
            tries += 1
            errors.append(run._retry_at - second)
    assert errors[:3] == [5.0, 10.0, 20.0]
    assert errors[-1] == 300.0
    assert tries < 25


def test_the_end_tries_a_failed_library_once_more_and_says_what_failed(settings: Settings) -> None:
    library = Library()
    library.failure = RuntimeError("still\ndown")
    run = tracked(settings, library)
    make_steps(settings, range(1))
    run.advance()
    run.finish()
    assert read_state(settings.run_dir, "wandb").problem == "RuntimeError: still down"
    library.failure = None
    run.finish()
    assert library.versions == [1]


def test_a_long_file_is_sent_in_pieces(settings: Settings) -> None:
    library = Library()
    make_steps(settings, range(1000))
    size = (settings.run_dir / "metrics.jsonl").stat().st_size
    assert size > CHUNK_BYTES
    run = tracked(settings, library)
    assert run.advance() is True
    assert 0 < len(library.points) < 1000
    run.finish()
    assert library.versions == list(range(1, 1001))


def test_evaluations_are_sent_beside_steps(settings: Settings) -> None:
    library = Library()
    make_steps(settings, range(2))
    (settings.run_dir / "eval.jsonl").write_text(
        '{"version": 2, "set": "math", "greedy": 0.5, "time": 1.0}\n'
    )
    run = tracked(settings, library)
    run.finish()
    assert library.points[-1].numbers == {"eval/math/greedy": 0.5}
    assert read_state(settings.run_dir, "wandb").version == 2


def test_steps_made_again_after_a_rewind_are_sent_with_higher_ordinals(settings: Settings) -> None:
    library = Library()
    make_steps(settings, range(3))
    make_steps(settings, range(1, 3), epoch="e2")
    tracked(settings, library).finish()
    assert library.versions == [1, 2, 3, 2, 3]
    assert [point.ordinal for point in library.points] == list(range(5))
