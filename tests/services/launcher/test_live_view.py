"""Tests what the terminal shows of a run, as text of a fixed width."""

import io
from typing import Any

from rich.console import Console

from services.launcher.live_view import RunView, render_view
from services.observability.service_rows import ServiceRow
from services.run_record.steps import step_seconds


def shown(view: RunView, width: int = 100) -> str:
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO())
    console.print(render_view(view))
    return console.export_text()


def line(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step, "version": step + 1, "epoch": "e", "time": 1000.0 + 2 * step, "reward_mean": 0.25,
        "lag_mean": 0.5, "lag_max": 1, "trained_tokens": 300, "loss": -0.0123, "wait_s": 0.5, "train_s": 1.0,
        "publish_s": 0.0, "step_s": 1.5, **fields,
    }  # fmt: skip


def view(**fields: Any) -> RunView:
    known: dict[str, Any] = {"run": "demo", "state": "running", "version": 3, "steps": 33, "seconds": 75.0}
    return RunView(**known | fields)


def test_view_of_a_start_has_no_numbers_that_are_not_known() -> None:
    text = shown(
        view(state="starting", version=0, services=(ServiceRow("trainer", "starts", "starts", 4.0),))
    )
    assert "demo starting" in text
    assert "0/33" in text
    assert "ETA" not in text
    assert "tokens/s" not in text
    assert "trainer  starts  4 s" in text


def test_view_of_a_run_has_rate_remaining_time_and_steps() -> None:
    text = shown(view(bound="E=1 B=8 mask", lines=tuple(line(step) for step in range(3))))
    assert "demo running  E=1 B=8 mask  1 min 15 s" in text
    assert "3/33  2.0 s a step  ETA 1 min 0 s  200 tokens/s" in text
    rows = [row.split() for row in text.splitlines()]
    assert ["version", "reward", "lag", "max", "lag", "tokens", "loss", "wait", "s", "train", "s"] in rows
    assert ["3", "0.250", "0.50", "1", "300", "-0.0123", "0.5", "1.0"] in rows


def test_view_says_who_waits_for_whom_since_when() -> None:
    services = (
        ServiceRow("trainer", "works", "step 3", 120.0),
        ServiceRow("reward.0", "waits", "waits for rollouts", None, restarts=2),
    )
    rows = [row.rstrip() for row in shown(view(services=services)).splitlines()]
    assert "trainer   step 3              2 min 0 s" in rows
    assert "reward.0  waits for rollouts             2 restarts" in rows


def test_view_shows_what_was_not_measured_as_a_dash() -> None:
    text = shown(view(lines=(line(0, reward_mean=None, loss=None, train_s=None, wait_s=None, step_s=None),)))
    assert ["1", "-", "0.50", "1", "300", "-", "-", "-"] in [row.split() for row in text.splitlines()]
    assert "tokens/s" not in text


def test_view_has_warnings_and_cannot_be_driven_by_them() -> None:
    text = shown(view(warnings=("step 2 was skipped: \x1b[2Jnan",)))
    assert "! step 2 was skipped: \\x1b[2Jnan" in text


def test_view_of_a_finished_run_has_no_remaining_time() -> None:
    text = shown(view(state="done", version=33, lines=tuple(line(step) for step in range(30, 33))))
    assert "33/33" in text
    assert "ETA" not in text


def test_view_fits_a_narrow_terminal() -> None:
    services = tuple(
        ServiceRow(f"rollout.{i}", "waits", "waits for the trainer's next step (staleness bound)", 9.0)
        for i in range(40)
    )
    text = shown(view(services=services, lines=(line(0), line(1))), width=60)
    assert all(len(row) <= 60 for row in text.splitlines())
    assert "24 more processes" in text
    assert len(text.splitlines()) < 30


def test_rate_needs_two_steps_with_times() -> None:
    assert step_seconds([]) is None
    assert step_seconds([line(0)]) is None
    assert step_seconds([line(0), line(1, time=1000.0)]) is None
    assert step_seconds([line(step) for step in range(40)]) == 2.0


def test_rate_falls_while_a_step_takes_longer_than_those_before() -> None:
    lines = [line(step) for step in range(5)]
    assert step_seconds(lines, since_s=1.0) == 2.0
    assert step_seconds(lines, since_s=92.0) == 20.0
    text = shown(view(lines=tuple(lines), since_step_s=92.0))
    assert "20.0 s a step  ETA 10 min 0 s" in text
