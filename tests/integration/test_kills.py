"""kill -9 of a rollout worker and a reward worker that hold work, of the trainer between take and commit, and
of the ledger, in one run."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.lifecycle import GroupState
from services.ledger.redis.ledger import RedisLedger
from services.run_record.steps import read_steps
from tests.integration.command import audit, ledger_of, pids, processes_of, tether_up, until
from tests.integration.loop import ROOT

STEPS = 10
KINDS = {
    "scripted": (
        "engine.name=scripted",
        "engine.seconds_per_token=0.01",
        "trainer.backend=scripted",
        "trainer.step_s=0.1",
    ),
    "model": ("engine.name=hf", "trainer.backend=reference"),
}
OVERRIDES = (
    "trainer.checkpoint_every=5",
    "bound.groups_per_step=8",
    "eval.at_end=false",
    "monitor.enabled=false",
    "rollout.lease_s=2",
    "rollout.groups_in_flight=8",
    "bus.peer_timeout_s=2",
    'reward.verifiers=[{name="tests.integration.slow_verifier"}]',
)
WORKERS = {"rollout.0", "rollout.1", "reward.0", "reward.1"}
ARGUMENTS = [
    str(ROOT / "deploy/configs/demo.toml"),
    "--steps",
    str(STEPS),
    "--rollouts",
    "2",
    "--rewards",
    "2",
]
ARGUMENTS += [word for override in OVERRIDES for word in ("--set", override)]


@pytest.mark.parametrize("kind", ["scripted", pytest.param("model", marks=pytest.mark.slow)])
def test_a_run_survives_the_death_of_every_kind_of_worker(tmp_path: Path, kind: str) -> None:
    words = [word for override in KINDS[kind] for word in ("--set", override)]
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    with tether_up(*ARGUMENTS, *words, "--run-dir", str(run_dir), output=output) as up:
        until(lambda: len(read_steps(run_dir / "metrics.jsonl")) >= 2, seconds=180, what="step 2")
        alive = until(
            lambda: (found := pids(run_dir)).keys() >= WORKERS and found,
            seconds=120,
            what="two workers of each kind",
        )
        os.kill(alive["rollout.0"], signal.SIGKILL)
        os.kill(alive["reward.1"], signal.SIGKILL)
        asyncio.run(kill_between_take_and_commit(run_dir, alive["trainer"]))
        os.kill(json.loads((run_dir / "ledger/endpoint.json").read_text())["pid"], signal.SIGKILL)
        assert up.wait(400) == 0, output.read_text()
    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    result = audit(run_dir)
    assert (result["code"], result["violations"], result["steps"], result["trained"]) == (
        0,
        [],
        STEPS,
        STEPS * 8,
    )
    assert len({step["epoch"] for step in steps}) == 2
    assert processes_of(run_dir) == []
    assert list(Path("/dev/shm").glob(f"tether-demo-*{os.getpid()}*")) == []


async def kill_between_take_and_commit(run_dir: Path, trainer: int) -> None:
    """Stop the trainer until it is caught with TAKEN groups, then kill it."""
    async with ledger_of(run_dir) as ledger, asyncio.timeout(240):
        while True:
            if await taken(ledger):
                os.kill(trainer, signal.SIGSTOP)
                if await taken(ledger):
                    break
                os.kill(trainer, signal.SIGCONT)
            await asyncio.sleep(0.005)  # leaves the processor to the trainer; a step takes longer
        os.kill(trainer, signal.SIGKILL)


async def taken(ledger: RedisLedger) -> Any:
    """How many groups are in the running step."""
    return (await ledger.status()).states.get(GroupState.TAKEN, 0)
