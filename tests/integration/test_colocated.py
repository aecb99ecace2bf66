"""Trainer and engine by turns on one device: never both, nothing is lost by it, and the results are those of
a run without turns."""

import asyncio
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from protocol.lifecycle import GroupState
from protocol.topics import Role
from services.gpu_sharing.turn import HOLDS, TURN, Turn
from services.ledger.redis.ledger import RedisLedger
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.contracts.sglang_environment import STAND_INS, sglang_python
from tests.contracts.sglang_jax_environment import sglang_jax_python
from tests.gpus import visible_gpus
from tests.integration.command import audit, ledger_of, processes_of, tether, tether_up, until
from tests.integration.loop import ROOT, Finished, run_to_end
from tests.integration.test_loop import SMALL, of, small

STEPS = 4
LEASE_MS = 2000
GREEDY = (
    "sampling.temperature=0",
    "algorithm.entropy_coef=0.1",
    "bound.max_staleness=0",
    f"run.steps={STEPS}",
)
"""Tokens do not depend on chance, and the gradient, that of the entropy alone, not on log-probabilities."""
CHANGED = slow_unless_changed(
    "services/gpu_sharing/", "services/rollout/", "services/trainer/", "rollout/engines/in_process/",
    "rollout/engines/megatron/", "trainer/reference/", "tests/integration/test_colocated.py",
)  # fmt: skip
TRAINERS_LOGPROBS = ("trainer.recompute_logprobs=true", "algorithm.importance_cap=0")
"""For algorithms with other gradients: the engine's log-probabilities, which are not used, are rounded by the
number of requests that happened to run at once."""


def digests(run: Finished) -> list[object]:
    """Return the digests of the weights after each step."""
    return [event["digest"] for event in of(run, "commit")]


def assert_by_turns(messages: list[str]) -> int:
    """No engine holds the device in a turn of the trainer. Returns in how many of them a step was made."""
    holders: set[str] = set()
    trainers, steps = True, 0
    for message in messages:
        event, _, rest = message.partition(" ")
        if event == "device.held":
            assert not trainers, messages
            holders.add(rest)
        elif event == "device.left":
            holders.discard(rest)
        elif event == "turn.trainer":
            assert not holders, messages
            trainers = True
        elif event == "turn.engines":
            trainers = False
        elif event == "step.done":
            assert trainers, messages
            steps += 1
    return steps


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("hf", "megatron"),
        pytest.param("hf", "reference", marks=CHANGED),
        pytest.param("megatron", "reference", marks=CHANGED),
    ],
)
async def test_the_engine_sleeps_in_every_step_and_the_weights_are_those_of_a_run_without_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str, backend: str
) -> None:
    parts = (f"engine.name={engine}", f"trainer.backend={backend}")
    alone = await run_to_end(small(tmp_path / "alone", *GREEDY, *parts), checked=False)
    with caplog.at_level(logging.INFO, "tether"):
        run = await run_to_end(
            small(tmp_path / "turns", *GREEDY, *parts, "colocated.enabled=true"), checked=False
        )
    assert (run.status.version, run.audit.violations, run.audit.max_lag) == (STEPS, [], 0)
    assert assert_by_turns([record.getMessage() for record in caplog.records]) == STEPS
    assert digests(run) == digests(alone)
    assert len(set(digests(run))) == STEPS


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["sglang", "sglang_jax"])
async def test_sglang_sleeps_in_every_step_and_the_weights_are_those_of_the_reference_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    alone = await run_to_end(small(tmp_path / "alone", *GREEDY), checked=False)
    stand_ins = f'engine.environment={{ PYTHONPATH = "{STAND_INS}" }}'
    own = {
        "sglang": (f'engine.python="{sglang_python()}"', stand_ins),
        "sglang_jax": (f'engine.python="{sglang_jax_python()}"',),
    }
    sglang = (f"engine.name={engine}", "engine.start_timeout_s=600", *own[engine])
    with caplog.at_level(logging.INFO, "tether"):
        run = await run_to_end(
            small(tmp_path / "turns", *GREEDY, *sglang, "colocated.enabled=true"), seconds=600, checked=False
        )
    assert (run.status.version, run.audit.violations, run.audit.max_lag) == (STEPS, [], 0)
    assert assert_by_turns([record.getMessage() for record in caplog.records]) == STEPS
    assert digests(run) == digests(alone)


async def test_groups_in_flight_keep_their_leases_while_two_engines_sleep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = small(
        tmp_path, "colocated.enabled=true", "bound.max_staleness=2", "sampling.max_tokens=12",
        f"run.steps={STEPS}", "trainer.checkpoint_every=2",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "tether"):
        run = await run_to_end(settings, rollouts=2)
    assert (run.status.version, run.audit.violations) == (STEPS, [])
    assert assert_by_turns([record.getMessage() for record in caplog.records]) == STEPS
    assert set(Counter(event["group"] for event in of(run, "lease")).values()) == {1}


@pytest.mark.slow
def test_a_run_goes_on_although_the_engine_dies_asleep_and_the_trainer_in_its_turn(tmp_path: Path) -> None:
    overrides = [
        *SMALL, "run.steps=100000", "colocated.enabled=true", "eval.at_end=false",
        f"rollout.lease_s={LEASE_MS / 1000}", "sampling.max_tokens=24",
    ]  # fmt: skip
    arguments = [
        str(ROOT / "deploy/configs/demo.toml"),
        *(word for override in overrides for word in ("--set", override)),
    ]
    with tether_up(*arguments, "--run-dir", str(tmp_path), output=tmp_path / "up.log") as up:
        until(lambda: len(read_steps(tmp_path / "metrics.jsonl")) >= 1, seconds=180, what="the first step")
        asyncio.run(kill_both(tmp_path))
        until(
            lambda: len({step["epoch"] for step in read_steps(tmp_path / "metrics.jsonl")}) == 2,
            seconds=240,
            what="the next trainer",
        )
        assert tether("drain", str(tmp_path)).returncode == 0
        assert up.wait(400) == 0, (tmp_path / "up.log").read_text()
    found = read_steps(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in found] == list(range(len(found)))
    result = audit(tmp_path)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], len(found))
    assert processes_of(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "transport", "eager"),
    [("vllm", "shm", "true"), ("vllm", "ipc", "true"), ("vllm", "ipc", "false"), ("sglang", "ipc", "true")],
)
def test_an_engine_and_megatron_share_a_gpu(tmp_path: Path, engine: str, transport: str, eager: str) -> None:
    own = {
        "vllm": [],
        "sglang": [
            f'engine.python="{sglang_python()}"',
            "engine.attention_backend=triton",
            "engine.dtype=bfloat16",
        ],
    }
    overrides = [
        *own[engine], f"engine.name={engine}", "run.steps=6", "colocated.enabled=true",
        f"weights.transport={transport}", f"engine.enforce_eager={eager}", "eval.at_end=false",
        "engine.memory_fraction=0.8", "sampling.max_tokens=24", "trainer.checkpoint_every=3",
        f'services.trainer_gpus="{visible_gpus()[0]}"', f'services.rollout_gpus="{visible_gpus()[0]}"',
    ]  # fmt: skip
    arguments = [
        str(ROOT / "deploy/configs/demo.toml"),
        *(word for override in overrides for word in ("--set", override)),
    ]
    with tether_up(*arguments, "--run-dir", str(tmp_path), output=tmp_path / "up.log") as up:
        assert up.wait(800) == 0, (tmp_path / "up.log").read_text()
    result = audit(tmp_path)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], 6)
    errors = [step["logprob_error_max"] or 0 for step in read_steps(tmp_path / "metrics.jsonl")]
    assert max(errors) < 0.1, errors  # both compute in bfloat16, whose rounding alone made 0.022 of vLLM's


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("trainer", "transport"), [(1, "shm"), (2, "ipc")])
def test_both_ranks_of_an_engine_sleep_in_every_step(tmp_path: Path, trainer: int, transport: str) -> None:
    overrides = [
        *GREEDY, *TRAINERS_LOGPROBS, "algorithm.name=reinforce_plus_plus", "engine.name=megatron",
        "engine.tensor_parallel_size=2", "run.steps=2",
        f"parallel.tensor_model_parallel_size={trainer}", "eval.at_end=false", "monitor.enabled=false",
        "services.restarts=0", f"weights.transport={transport}", "trainer.checkpoint_every=2",
    ]  # fmt: skip
    words = [word for override in overrides for word in ("--set", override)]
    demo, found = str(ROOT / "deploy/configs/demo.toml"), {}
    for turns in ("false", "true"):
        run_dir = tmp_path / turns
        up = ("up", demo, "--run-dir", str(run_dir), *words, "--set", f"colocated.enabled={turns}")
        result = tether(*up, seconds=280)
        assert result.returncode == 0, result.stdout + result.stderr
        checked = audit(run_dir)
        assert (checked["code"], checked["violations"], checked["steps"]) == (0, [], 2)
        lines = (run_dir / "audit.jsonl").read_text().splitlines()
        found[turns] = [line["digest"] for line in map(json.loads, lines) if line["event"] == "commit"]
        assert processes_of(run_dir) == []
    assert len(set(found["true"])) == 2
    assert found["true"] == found["false"]
    log = (tmp_path / "true/logs/rollout.0.log").read_text()
    assert log.count("device.left") >= 2
    assert log.count("device.held") >= 2


async def kill_both(run_dir: Path) -> None:
    """The engine while it sleeps, then, when another has taken its place, the trainer while it makes a
    step."""
    async with ledger_of(run_dir) as ledger, asyncio.timeout(240):
        trainer, asleep = await stopped_in_its_turn(ledger)
        while not await leases_outlive_their_time(ledger):
            os.kill(trainer["pid"], signal.SIGCONT)
            trainer, asleep = await stopped_in_its_turn(ledger)
        os.kill(asleep["pid"], signal.SIGKILL)
        os.kill(trainer["pid"], signal.SIGCONT)
        trainer, successor = await stopped_in_its_turn(ledger, not_with=asleep["pid"])
        os.kill(trainer["pid"], signal.SIGKILL)
        assert successor["pid"] != asleep["pid"]


async def leases_outlive_their_time(ledger: RedisLedger) -> bool:
    """Wait until all leases are extended beyond what was left of them and once more; false if there is
    none."""
    key = next(key for key in ledger.keys.all if key.endswith("leases"))
    before = await expiries(ledger, key)
    now = before
    while now and any(now[group] < before[group] + LEASE_MS for group in now):
        await asyncio.sleep(0.02)
        now = {group: expiry for group, expiry in (await expiries(ledger, key)).items() if group in before}
    return bool(now)


async def expiries(ledger: RedisLedger, key: str) -> dict[bytes, float]:
    """Group -> when its lease runs out, ms."""
    found = await ledger._connection.command("ZRANGE", key, 0, -1, "WITHSCORES")
    return {group: float(expiry) for group, expiry in found}


async def stopped_in_its_turn(
    ledger: RedisLedger, not_with: int = 0
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the registry says of the trainer and of the engine; the trainer is stopped while it makes a step,
    and the engine sleeps."""
    while True:
        if found := await in_its_turn(ledger, not_with):
            os.kill(found[0]["pid"], signal.SIGSTOP)
            if still := await in_its_turn(ledger, not_with):
                return still
            os.kill(found[0]["pid"], signal.SIGCONT)
        await asyncio.sleep(0.005)


async def in_its_turn(
    ledger: RedisLedger, not_with: int
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The trainer and the engine, if there is one of each, the one makes a step and the other sleeps."""
    trainers = [peer.info for peer in await ledger.peers(Role.TRAINER)]
    engines = [peer.info for peer in await ledger.peers(Role.ROLLOUT) if peer.info["pid"] != not_with]
    taken = (await ledger.status()).states.get(GroupState.TAKEN, 0)
    asleep = [engine.get(HOLDS) for engine in engines] == [False]
    begun = [trainer.get(TURN) for trainer in trainers] == [Turn.TRAINER]
    return (trainers[0], engines[0]) if begun and asleep and taken else None
