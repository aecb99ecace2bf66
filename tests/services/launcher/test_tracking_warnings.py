"""Tests what the terminal says of trackers: each problem once, and at the end how far they got."""

import asyncio
from pathlib import Path

import msgspec

from services.launcher.tracking_warnings import describe_tracking, warn_loop
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.tracking.state import TrackingState, write_state


def tracked(run_dir: Path) -> Settings:
    (run_dir / "tracking").mkdir(parents=True)
    return load_settings(None, [f"run.dir={run_dir}", "tracking.kind=['wandb', 'mlflow']"], {})


async def test_problem_of_a_tracker_is_printed_once(tmp_path: Path) -> None:
    settings = tracked(tmp_path)
    write_state(tmp_path, "mlflow", TrackingState(problem="OSError: no network"))
    said: list[str] = []
    printed = asyncio.Event()

    def note(text: str) -> None:
        said.append(text)
        printed.set()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(warn_loop(settings, note), name="warnings")
        await printed.wait()
        watching.cancel()
    assert said == [
        "warning: tracking by mlflow failed and is tried again; the run continues: OSError: no network"
    ]


def test_end_says_what_was_sent_and_how_to_send_the_rest(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    settings = tracked(run_dir)
    (run_dir / "metrics.jsonl").write_text("x" * 10)
    state = TrackingState(url="https://w", offsets={"metrics.jsonl": 10}, sent=3, version=3)
    write_state(run_dir, "wandb", state)
    write_state(
        run_dir, "mlflow", msgspec.structs.replace(state, offsets={"metrics.jsonl": 4}, version=1, sent=1)
    )
    assert list(describe_tracking(settings)) == [
        "tracking by wandb: all 3 points were sent; https://w",
        "warning: tracking by mlflow got 1 points, up to version 1 (remaining points were not sent in time); "
        f"`tether track '{run_dir}'` sends the rest",
    ]
