"""kill -9 of the rollout worker at every call of a 20-turn episode, and of the ingest and the ledger.

python -m pytest -m slow tests/integration/test_durable_calls.py
"""

import json
import os
import signal
from pathlib import Path

import pytest

from services.observability.steps import read_steps
from tests.integration.command import audit, pids, processes_of, tether_up, until
from tests.integration.long_episode import TURNS
from tests.integration.loop import ROOT

STEPS = 4
OVERRIDES = (
    "environment.name=agent",
    'environment.options={function="tests.integration.long_episode:solve"}',
    "engine.name=scripted",
    "engine.max_model_len=256",
    "model.scratch.max_position_embeddings=256",
    "trainer.backend=scripted",
    "trainer.checkpoint_every=2",
    "bound.groups_per_step=2",
    "bound.max_staleness=4",
    "sampling.samples_per_prompt=2",
    "eval.at_end=false",
    "rollout.lease_s=2",
    "rollout.groups_in_flight=2",
    "bound.max_attempts=1000",
    "services.restarts=1000",
    "bus.peer_timeout_s=2",
)
ARGUMENTS = [str(ROOT / "deploy/configs/demo.toml"), "--steps", str(STEPS), "--rollouts", "2"]
ARGUMENTS += [word for override in OVERRIDES for word in ("--set", override)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("calls", [range(TURNS)], ids=["every call"])
def test_no_acknowledged_call_is_lost_or_trained_twice(
    tmp_path: Path, calls: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills, run_dir = tmp_path / "kills", tmp_path / "run"
    kills.mkdir()
    for call in calls:
        (kills / str(call)).touch()
    monkeypatch.setenv("LONG_EPISODE_KILLS", str(kills))
    with tether_up(*ARGUMENTS, "--run-dir", str(run_dir), output=tmp_path / "up.log") as up:
        until(lambda: len(list(kills.iterdir())) <= len(calls) // 2, seconds=900, what="half of the kills")
        os.kill(pids(run_dir)["ingest"], signal.SIGKILL)
        os.kill(json.loads((run_dir / "ledger/endpoint.json").read_text())["pid"], signal.SIGKILL)
        assert up.wait(1500) == 0, (tmp_path / "up.log").read_text()
    assert list(kills.iterdir()) == []
    assert len(read_steps(run_dir / "metrics.jsonl")) == STEPS
    found = audit(run_dir)
    assert (found["code"], found["violations"], found["steps"]) == (0, [], STEPS)
    assert found["call_tokens"] > 0
    assert processes_of(run_dir) == []
