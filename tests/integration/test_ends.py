"""How a run ends that cannot continue: drained, with one sentence, with nothing left in shared memory."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.ledger.event_log.archiver import FILE
from services.run_record.steps import read_steps
from tests.changes import LAUNCHER, VLLM, slow_unless_changed
from tests.integration.command import audit, pids, processes_of, tether_up, until
from tests.integration.loop import ROOT

SETS = (
    "engine.seconds_per_token=0.05",
    "trainer.checkpoint_every=1",
    "rollout.drain_s=0",
    "services.restarts=0",
    "run.steps=100000",
)
QUICK = ("engine.seconds_per_token=0.001", "engine.straggler_share=0")
"""Settings of a run that is started again only to be finished: no group is held for seconds."""


def arguments(run_dir: Path, run: str, *sets: str) -> list[str]:
    words = [word for setting in (*SETS, f"run.name={run}", *sets) for word in ("--set", setting)]
    return [str(ROOT / "deploy/configs/stragglers.toml"), "--run-dir", str(run_dir), *words]


def shared_memory(run: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"tether-{run}-*"))


def services(run_dir: Path, run: str, up: "subprocess.Popen[bytes]", output: Path) -> dict[str, int]:
    """Wait until a version that was trained is in shared memory, and all services are there; return their
    pids."""
    until(
        lambda: up.poll() is not None or len(read_steps(run_dir / "metrics.jsonl")) >= 2,
        seconds=120,
        what="the second step",
    )
    assert up.poll() is None, output.read_text()
    assert [list(path.glob("v*")) for path in shared_memory(run)] not in ([], [[]])
    return until(
        lambda: (found := pids(run_dir, run)).keys() >= {"monitor", "reward.0"} and found,
        seconds=60,
        what="the page and a reward worker",
    )


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


@slow_unless_changed(*LAUNCHER)
@pytest.mark.parametrize("victim", ["trainer", pytest.param("reward.0", marks=pytest.mark.slow)])
def test_a_service_that_is_given_up_ends_the_run_drained_and_leaves_nothing(
    tmp_path: Path, victim: str
) -> None:
    """A trainer that is killed cannot remove what it has published."""
    run, run_dir, output = f"ends-{os.getpid()}", tmp_path / "run", tmp_path / "up.log"
    with tether_up(*arguments(run_dir, run), output=output) as up:
        os.kill(services(run_dir, run, up, output)[victim], signal.SIGKILL)
        assert up.wait(120) == 1
    text = output.read_text()
    assert f"tether: ServiceFailed: {victim} died 1 times in a minute, last with exit code -9" in text
    assert "Traceback" not in text
    assert (processes_of(run_dir), shared_memory(run)) == ([], [])
    # what the engine held was handed back, and the ingest has archived even that
    released = [event for event in events(run_dir) if event["event"] == "release"]
    assert {event["reason"] for event in released} == {"drain"}
    result, made = audit(run_dir), len(read_steps(run_dir / "metrics.jsonl"))
    assert (result["code"], result["violations"]) == (0, [])
    with tether_up(*arguments(run_dir, run, f"run.steps={made + 3}", *QUICK), output=output) as up:
        assert up.wait(120) == 0, output.read_text()
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], made + 3)


@slow_unless_changed(*LAUNCHER, "services/monitor/")
def test_a_run_outlives_its_page_and_leaves_no_weights_at_a_second_ctrl_c(tmp_path: Path) -> None:
    run, run_dir, output = f"ends-killed-{os.getpid()}", tmp_path / "run", tmp_path / "up.log"
    with tether_up(*arguments(run_dir, run), output=output) as up:
        alive = services(run_dir, run, up, output)
        os.kill(alive["monitor"], signal.SIGKILL)
        until(lambda: "service.given_up name=monitor" in output.read_text(), seconds=60, what="its end")
        made = len(read_steps(run_dir / "metrics.jsonl"))
        until(lambda: len(read_steps(run_dir / "metrics.jsonl")) > made + 2, seconds=60, what="more steps")
        os.kill(alive["trainer"], signal.SIGSTOP)  # it cannot drain
        up.send_signal(signal.SIGINT)
        until(lambda: "Ctrl-C again" in output.read_text(), seconds=60, what="the drain")
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0, output.read_text()
    assert (processes_of(run_dir), shared_memory(run)) == ([], [])


@slow_unless_changed(*VLLM, "tests/integration/test_ends.py")
def test_setting_refused_at_the_start_of_an_engine_ends_the_run_at_once(tmp_path: Path) -> None:
    """The checks before the start do not find this one, and vLLM's engine process does."""
    run, run_dir, output = f"ends-engine-{os.getpid()}", tmp_path / "run", tmp_path / "up.log"
    refused = "engine.arguments.block_size=7"
    sets = ("engine.name=vllm", "engine.max_model_len=64", "services.restarts=5", refused)
    with tether_up(*arguments(run_dir, run, *sets), output=output) as up:
        assert up.wait(120) == 2, output.read_text()
    text = output.read_text()
    assert text.splitlines()[-1].startswith("tether: rollout: vLLM cannot serve ")
    assert "No common block size for 7" in text.splitlines()[-1]
    assert "Traceback" not in text
    assert (run_dir / "logs/rollout.0.log").read_text().count("process.failed") == 1
    assert (processes_of(run_dir), shared_memory(run)) == ([], [])


@slow_unless_changed(*LAUNCHER, "services/ledger/event_log/", "services/ingest/")
def test_a_run_whose_event_log_was_deleted_ends_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    run, run_dir, output = f"ends-log-{os.getpid()}", tmp_path / "run", tmp_path / "up.log"
    path, aside = run_dir / FILE, tmp_path / "aside"
    with tether_up(*arguments(run_dir, run, "services.restarts=5"), output=output) as up:
        services(run_dir, run, up, output)
        path.rename(aside)
        assert up.wait(120) == 2
    last = output.read_text().splitlines()[-1]
    assert last.startswith(f"tether: ingest: {path} ends at event 0, and the ledger begins at event ")
    assert "Put the whole file back and start the run again" in last
    assert last.endswith(f"at the newest of {run_dir / 'exports'}")
    assert (run_dir / "logs/ingest.log").read_text().count("process.failed") == 1
    assert not path.exists()
    with tether_up(*arguments(run_dir, run), output=output) as up:
        assert up.wait(120) == 2, output.read_text()
    assert output.read_text().splitlines()[-1].startswith(f"tether: {path} ends at event 0")
    aside.rename(path)
    made = len(read_steps(run_dir / "metrics.jsonl"))
    with tether_up(*arguments(run_dir, run, f"run.steps={made + 3}", *QUICK), output=output) as up:
        assert up.wait(120) == 0, output.read_text()
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], made + 3)
