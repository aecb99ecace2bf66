"""Tests the `tether` command on a run that is on, interrupted, and resumed.

One run serves all tests; each checks a part of what was recorded.
"""

import json
import signal
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.ledger.event_log.archiver import FILE
from services.run_record.steps import read_steps
from tests.integration.command import audit, processes_of, service_of, tether, tether_here, tether_up, until
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")
FIELDS = {
    "step", "version", "reward_mean", "lag_mean", "lag_max", "trained_tokens", "wasted_tokens",
    "generate_s", "train_s", "publish_s", "pause_ms", "wait_s",
}  # fmt: skip

SERVICES = 6

pytestmark = [
    pytest.mark.xdist_group("command"),  # one story, not one for each process
    pytest.mark.timeout(900),  # the story counts as part of the first test
]


@dataclass
class Story:
    """What was recorded of a run."""

    run_dir: Path
    status: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    alive: dict[str, int] = field(default_factory=dict)
    """Pids of the services' processes, by name."""
    pages: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    second_up: tuple[int, str] = (0, "")
    set_output: str = ""
    first_code: int = -1
    first_log: str = ""
    first_steps: list[dict[str, Any]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    after: str = ""
    refused: str = ""
    second_code: int = -1
    second_log: str = ""


def status_of(run_dir: Path) -> dict[str, Any]:
    result = tether_here("status", run_dir, "--json")
    assert result.returncode == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def fetch(url: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.status, answer.headers["Content-Type"].split(";")[0], answer.read().decode()


def left_over(run_dir: Path, shm: set[Path]) -> list[str]:
    """Processes and shared memory that a run has left behind."""
    return [str(pid) for pid in processes_of(run_dir)] + [str(path) for path in set(shared_memory()) - shm]


def shared_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("tether-commandtest-*"))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    run_dir = tmp_path_factory.mktemp("command") / "run"
    record = Story(run_dir)
    metrics = run_dir / "metrics.jsonl"
    options = (
        CONFIG,
        "--run-dir",
        str(run_dir),
        "--rollouts",
        "2",
        "--set",
        "run.name=commandtest",
        "--set",
        "engine.seconds_per_token=0.02",
        "--set",
        "trainer.step_s=0.2",
    )
    shm = set(shared_memory())
    out = run_dir.parent / "first.log"
    with tether_up(*options, "--steps", "100000", output=out) as up:
        until(lambda: len(read_steps(metrics)) >= 3, seconds=180, what="step 3")
        record.second_up = refused_second(run_dir)
        record.status = until(lambda: complete(status_of(run_dir)), seconds=180, what="a complete status")
        record.alive = {name: pid for pid in processes_of(run_dir) if (name := service_of(pid))}
        record.text = tether("status", str(run_dir)).stdout  # as a user does
        record.pages = pages(record.status)
        record.set_output = tether_here("set", run_dir, "max-staleness", "2").stdout
        until(lambda: status_of(run_dir)["bound"]["max_staleness"] == 2, seconds=180, what="the new bound")
        more = len(read_steps(metrics)) + 5
        until(lambda: len(read_steps(metrics)) > more, seconds=180, what="steps under the new bound")
        up.send_signal(signal.SIGINT)
        record.first_code = up.wait(240)
    record.first_log = out.read_text()
    record.first_steps = read_steps(metrics)
    record.left_over = left_over(run_dir, shm)
    record.after = tether_here("status", run_dir).stdout
    record.refused = tether_here("drain", run_dir).stderr
    out = run_dir.parent / "second.log"
    with tether_up(*options, "--steps", str(len(record.first_steps) + 5), output=out) as up:
        record.second_code = up.wait(240)
    record.second_log = out.read_text()
    record.left_over += left_over(run_dir, shm)
    return record


def refused_second(run_dir: Path) -> tuple[int, str]:
    result = tether_here("up", CONFIG, "--run-dir", run_dir)
    return result.returncode, result.stderr


def complete(status: dict[str, Any]) -> dict[str, Any] | None:
    """The status once every service is registered, the monitor with its page, and both engines serve a
    version."""
    engines, processes = status["engines"], status["processes"]
    serve = len(engines) == 2 and all(engine["version"] > 0 for engine in engines)
    return (
        status if serve and len(processes) == SERVICES and any(item["page"] for item in processes) else None
    )


def pages(status: dict[str, Any]) -> dict[str, tuple[int, str, str]]:
    """/health and /metrics of every service, and the monitor's own pages."""
    found = {}
    for item in status["processes"]:
        for path in ("/health", "/metrics"):
            found[f"{item['name']}{path}"] = fetch(f"http://127.0.0.1:{item['http']}{path}")
    page = next(item["page"] for item in status["processes"] if item["page"])
    until(
        lambda: fetch(f"{page}status.json")[2] != "{}",
        seconds=120,
        what="the monitor's first read of the ledger",
    )
    return found | {f"/{path}": fetch(page + path) for path in ("", "status.json", "steps.json")}


def test_up_ends_well_both_times(story: Story) -> None:
    assert story.first_code == 0, story.first_log
    assert story.second_code == 0, story.second_log


def test_status_lists_every_service_with_its_pid(story: Story) -> None:
    listed = {item["name"]: item["pid"] for item in story.status["processes"]}
    assert set(listed) == {"rollout.0", "rollout.1", "reward.0", "ingest", "trainer", "monitor"}
    assert listed == story.alive
    assert {item["service"] for item in story.status["processes"]} == {
        "rollout",
        "reward",
        "ingest",
        "trainer",
        "monitor",
    }


def test_status_lists_engines_with_their_versions(story: Story) -> None:
    engines = story.status["engines"]
    assert {engine["engine"] for engine in engines} == {
        item["incarnation"] for item in story.status["processes"] if item["service"] == "rollout"
    }
    assert all(0 < engine["version"] <= story.status["version"] for engine in engines)
    assert {engine["epoch"] for engine in engines} == {story.status["epoch"]}


def test_status_counts_groups_by_state(story: Story) -> None:
    status = story.status
    assert set(status["groups"]) == {"waiting", "leased", "scored", "taken"}
    assert sum(status["groups"].values()) == status["active"]
    assert status["issued"] == status["trained"] + status["dropped"] + status["active"]


def test_status_is_also_text(story: Story) -> None:
    assert story.text.startswith("running: version ")
    assert f"rollout.0    pid {story.alive['rollout.0']} " in story.text


def test_every_service_is_healthy_and_has_metrics(story: Story) -> None:
    for name in story.alive:
        assert story.pages[f"{name}/health"][0] == 200
        assert json.loads(story.pages[f"{name}/health"][2])["ok"] is True
        code, kind, text = story.pages[f"{name}/metrics"]
        assert (code, kind) == (200, "text/plain")
        assert "tether_work_seconds" in text
    assert 'tether_events_total{event="accepted"}' in story.pages["ingest/metrics"][2]
    assert 'tether_events_total{event="steps"}' in story.pages["trainer/metrics"][2]
    assert "tether_run_version" in story.pages["monitor/metrics"][2]


def test_the_monitor_has_a_page_and_what_it_shows(story: Story) -> None:
    assert story.pages["/"][:2] == (200, "text/html")
    assert "assets/main.js" in story.pages["/"][2]
    shown = json.loads(story.pages["/status.json"][2])
    assert shown["run_state"] == "running"
    assert {item["name"] for item in shown["processes"]} == set(story.alive)
    assert len(json.loads(story.pages["/steps.json"][2])["columns"]["step"]) >= 3
    page = next(item["page"] for item in story.status["processes"] if item["page"])
    assert f"page {page}" in story.first_log


def test_a_second_up_in_the_same_directory_is_refused(story: Story) -> None:
    code, stderr = story.second_up
    assert code == 2
    assert f"another `tether up` is running in {story.run_dir}" in stderr
    assert "Traceback" not in stderr


def test_a_new_bound_holds_for_later_leases_only(story: Story) -> None:
    assert story.set_output.startswith("max-staleness 2: ")
    events = [json.loads(line) for line in (story.run_dir / FILE).read_text().splitlines()]
    changed = next(
        event["seq"] for event in events if event["event"] == "bound" and event["max_staleness"] == 2
    )
    interrupted = next(
        event["seq"] for event in events if event["event"] == "claim" and event["seq"] > changed
    )
    bounds = {
        event["seq"]: event["bound"]
        for event in events
        if event["event"] == "lease" and event["seq"] < interrupted
    }
    assert {bound for seq, bound in bounds.items() if seq < changed} == {1}
    assert {bound for seq, bound in bounds.items() if seq > changed} == {2}


def test_up_says_once_what_its_start_took(story: Story) -> None:
    said = [line for line in story.first_log.splitlines() if line.startswith("started in ")]
    assert len(said) == 1
    assert "trainer (model)" in said[0]
    assert "rollout.0 (engine)" in said[0]


def test_ctrl_c_leaves_nothing_but_the_run(story: Story) -> None:
    assert story.left_over == []
    assert "draining: finishing what is in flight; Ctrl-C again to stop now" in story.first_log
    assert "stopped at version" in story.first_log
    assert "Traceback" not in story.first_log
    assert (story.run_dir / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_services_drain_at_ctrl_c(story: Story) -> None:
    for log in (story.run_dir / "logs").glob("*.log"):
        assert "process.failed" not in log.read_text(), log.read_text()
    assert "drain_timeout" not in story.first_log


def test_status_of_a_run_that_is_over_says_so(story: Story) -> None:
    assert story.after.startswith("run commandtest was stopped at version ")
    assert f"last step {story.first_steps[-1]['step']}: reward " in story.after
    assert story.refused.startswith("tether: run commandtest is not running; it was stopped at version ")
    assert story.refused.count("\n") == 1


def test_up_again_goes_on_from_where_it_was(story: Story) -> None:
    steps = read_steps(story.run_dir / "metrics.jsonl")
    before = len(story.first_steps)
    assert [step["step"] for step in steps] == list(range(before + 5))
    assert steps[:before] == story.first_steps
    assert len({step["epoch"] for step in steps[before:]} - {step["epoch"] for step in steps[:before]}) == 1
    assert f"done at version {before + 5} of {before + 5}" in story.second_log


def test_a_line_of_metrics_has_every_field(story: Story) -> None:
    for step in read_steps(story.run_dir / "metrics.jsonl"):
        assert set(step) >= FIELDS
        assert all(isinstance(step[name], int | float) for name in FIELDS - {"pause_ms"})
        assert step["version"] == step["step"] + 1


def test_verify_accepts_the_run(story: Story) -> None:
    result = audit(story.run_dir)
    assert (result["code"], result["violations"]) == (0, [])
    assert result["steps"] == len(story.first_steps) + 5
    assert result["bound"] == 2
    assert result["issued"] == result["trained"] + result["dropped"] + result["active"]


def test_verify_finds_an_edited_line(story: Story, tmp_path: Path) -> None:
    lines = (story.run_dir / FILE).read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "lease")
    lines[number] = json.dumps(json.loads(lines[number]) | {"version": 7})
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    result = audit(tmp_path)
    assert result["code"] == 1
    assert result["violations"]
