"""kill -9 of a trainer and a rollout worker that have spares: forks of these replace them; the run finishes.

Leases of the killed worker would last longer than the test.
"""

import os
import signal
from pathlib import Path

from services.run_record.steps import read_steps
from tests.changes import LAUNCHER, slow_unless_changed
from tests.integration.command import audit, pids, processes_of, tether_here, tether_up, until
from tests.integration.loop import ROOT

STEPS = 100_000
"""More than the run makes: it is drained once both services are back."""
MORE = 3
"""Steps after their return."""
KILLED = ("trainer", "rollout.1")
OVERRIDES = (
    "engine.name=hf",
    "trainer.backend=reference",
    "trainer.checkpoint_every=5",
    "bound.groups_per_step=8",
    "eval.at_end=false",
    "monitor.enabled=false",
    "rollout.lease_s=600",
    "rollout.groups_in_flight=8",
    "bus.peer_timeout_s=2",
    'reward.verifiers=[{name="tests.integration.slow_verifier"}]',
)
ARGUMENTS = [str(ROOT / "deploy/configs/demo.toml"), "--steps", str(STEPS), "--rollouts", "2"]
ARGUMENTS += [word for override in OVERRIDES for word in ("--set", override)]


def spare_pids(log: Path) -> dict[str, int]:
    """Spares that are ready, by the service that each is named after, as `tether up` has logged them."""
    lines = [line.split() for line in log.read_text().splitlines() if "spare.ready" in line]
    return {words[-2].removeprefix("name="): int(words[-1].removeprefix("pid=")) for words in lines}


@slow_unless_changed(*LAUNCHER, "services/trainer/", "services/rollout/", "services/ledger/")
def test_a_spare_replaces_a_trainer_and_a_rollout_worker_that_are_killed(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "up.log"
    with tether_up(*ARGUMENTS, "--run-dir", str(run_dir), output=log) as up:
        spares = until(
            lambda: (found := spare_pids(log)).keys() >= {"trainer", "rollout.0"} and found,
            seconds=240,
            what="the spares",
        )
        alive = until(
            lambda: (found := pids(run_dir)).keys() >= set(KILLED) and found, seconds=60, what="both services"
        )
        for name in KILLED:
            os.kill(alive[name], signal.SIGKILL)
        now = until(
            lambda: (
                (found := pids(run_dir)) and all(found.get(n, alive[n]) != alive[n] for n in KILLED) and found
            ),
            seconds=120,
            what="their restart",
        )
        assert spares.items() <= spare_pids(log).items()
        assert not {*now.values()} & {*spares.values()}
        made = len(read_steps(run_dir / "metrics.jsonl"))
        until(
            lambda: len(read_steps(run_dir / "metrics.jsonl")) >= made + MORE, seconds=120, what="more steps"
        )
        assert tether_here("drain", run_dir).returncode == 0
        assert up.wait(120) == 0, log.read_text()
    said = log.read_text()
    for name in KILLED:
        assert f"service.died name={name} code=-9 restarts=1" in said
        assert f"service.from_spare name={name} pid={now[name]}" in said
    assert (run_dir / "logs/rollout.1.log").read_text().count("ready part=engine") == 2
    steps = [step["step"] for step in read_steps(run_dir / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], len(steps))
    assert processes_of(run_dir) == []
