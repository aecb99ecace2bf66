"""kill -9 of worker, harness, ingest and ledger at every call of a 20-turn episode.

python -m pytest -m slow tests/integration/test_durable_calls.py
"""

import sys
from pathlib import Path

import pytest

from services.run_record.steps import read_steps
from tests.integration.command import audit, processes_of, tether_up
from tests.integration.long_episode import TURNS
from tests.integration.loop import ROOT

STEPS, GROUPS, SAMPLES = 4, 2, 2
OVERRIDES = (
    "engine.name=scripted",
    "engine.max_model_len=256",
    "model.scratch.max_position_embeddings=256",
    "trainer.backend=scripted",
    "trainer.checkpoint_every=2",
    f"bound.groups_per_step={GROUPS}",
    "bound.max_staleness=4",
    f"sampling.samples_per_prompt={SAMPLES}",
    "eval.at_end=false",
    "rollout.lease_s=2",
    "rollout.groups_in_flight=2",
    "bound.max_attempts=1000",
    "services.restarts=1000",
    "bus.peer_timeout_s=2",
    "environment.attempts=100",
    "ledger.retry_s=600",  # ledger and ingest are away for most of a minute, one after the other
)
PROGRAM = f'command=["{sys.executable}","-m","tests.integration.long_program"],directory="{ROOT}"'
CASES = {
    "function": ("agent", 'function="tests.integration.long_episode:solve"', {"": 1}),
    "program": ("command", PROGRAM, {"harness-": 1, "worker-": 5}),
    "standing program": ("command", PROGRAM + ",processes=4", {"harness-": 1, "ingest-": 1, "ledger-": 1}),
}
"""Harness, its options, and what is killed after every how many calls."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_no_acknowledged_call_is_lost_or_trained_twice(tmp_path: Path, case: str) -> None:
    name, options, killed = CASES[case]
    kills, run_dir, output = tmp_path / "kills", tmp_path / "run", tmp_path / "up.log"
    kills.mkdir()
    for what, every in killed.items():
        for call in range(0, TURNS, every):
            (kills / f"{what}{call}").touch()
    (temporary := tmp_path / "temporary").mkdir()
    variables = f'variables={{LONG_EPISODE_KILLS="{kills}"}}'
    environment = f"{{{options}{',' + variables if name == 'command' else ''}}}"
    settings = [*OVERRIDES, f"environment.name={name}", f"environment.options={environment}"]
    words = [word for setting in settings for word in ("--set", setting)]
    config = str(ROOT / "deploy/configs/demo.toml")
    with tether_up(
        config, "--steps", str(STEPS), "--rollouts", "2", *words, "--run-dir", str(run_dir), output=output,
        LONG_EPISODE_KILLS=str(kills), TMPDIR=str(temporary),
    ) as up:  # fmt: skip
        assert up.wait(1500) == 0, output.read_text()
    assert list(kills.iterdir()) == []
    assert len(read_steps(run_dir / "metrics.jsonl")) == STEPS
    found = audit(run_dir)
    assert (found["code"], found["violations"], found["steps"]) == (0, [], STEPS)
    # A call that was lost would have been made again, and the journal would have both.
    groups, more = divmod(found["calls"], SAMPLES * TURNS)
    assert (groups >= STEPS * GROUPS, more) == (True, 0)
    assert found["tool_results"] == found["calls"]
    assert found["call_tokens"] > 0
    assert processes_of(run_dir) == []
    assert list(temporary.glob("tether-program-*")) == []
