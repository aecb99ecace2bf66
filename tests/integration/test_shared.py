"""Transport `shared`: trainer and engine compute with the same weights, through updates, restarts and deaths
of either."""

import asyncio
import json
import logging
import os
import signal
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest

from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.gpus import visible_gpus
from tests.integration.command import audit, pids, processes_of, tether, tether_up, until
from tests.integration.loop import ROOT, Finished, run_to_end, running
from tests.integration.test_colocated import TRAINERS_LOGPROBS
from tests.integration.test_loop import of, small

STEPS = 8
PAIRS = {
    "hf": ("engine.name=hf", "trainer.backend=reference"),
    "megatron": ("engine.name=megatron", "trainer.backend=megatron"),
    "vllm": ("engine.name=vllm", "trainer.backend=megatron", "model.scratch.num_key_value_heads=1"),
}
LETTERS = "0123456789= " + ascii_letters[:50]
"""Tokens that are 64 with those of padding and end."""
VLLM_ALIKE = (
    "engine.name=vllm", "model.scratch.num_key_value_heads=2", f'model.scratch.vocabulary="{LETTERS}"',
)  # fmt: skip
"""A key-value head and half of the vocabulary on each of two ranks."""
CASES = [("hf", "float32"), ("megatron", "float32"), ("megatron", "bfloat16")]
SHARED = (
    "trainer/weights/shared", "rollout/staging/", "services/trainer/shared_engine.py",
    "trainer/megatron/convert/",
)  # fmt: skip
KILLED = (
    "weights.transport=shared", "trainer.checkpoint_every=4", "bound.groups_per_step=8",
    "bound.max_staleness=2", "eval.at_end=false", "rollout.lease_s=2", "rollout.groups_in_flight=8",
    "bus.peer_timeout_s=2", "ledger.ttl_s=2",
    'reward.verifiers=[{name="tests.integration.slow_verifier", options={seconds=0.02}}]',
)  # fmt: skip


def digests(run: Finished) -> list[object]:
    """Return the digests of the committed versions, in order."""
    return [event["digest"] for event in of(run, "commit")]


@pytest.mark.parametrize(
    ("pair", "dtype"),
    [
        ("hf", "float32"),
        pytest.param("megatron", "float32", marks=slow_unless_changed(*SHARED)),
        ("megatron", "bfloat16"),
    ],
)
async def test_weights_are_those_of_a_run_by_shm(tmp_path: Path, pair: str, dtype: str) -> None:
    greedy = (
        "bound.max_staleness=0",
        "sampling.temperature=0",
        "algorithm.entropy_coef=0.1",
    )  # nothing is left to chance
    same = (*PAIRS[pair], *greedy, f"trainer.dtype={dtype}", f"engine.dtype={dtype}")
    runs = [
        await run_to_end(small(tmp_path / way, *same, f"weights.transport={way}"), checked=False)
        for way in ("shm", "shared")
    ]
    assert digests(runs[0]) == digests(runs[1])
    assert len(set(digests(runs[1]))) == 3
    exports = [tmp_path / way / "exports/step_00000003/model.safetensors" for way in ("shm", "shared")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert [step["reward_mean"] for step in runs[0].steps] == [step["reward_mean"] for step in runs[1].steps]
    assert [event["version"] for event in of(runs[1], "applied")][:3] == [0, 1, 2]
    assert dtype == "bfloat16" or all(step["logprob_error_max"] < 1e-4 for step in runs[1].steps)
    assert list((tmp_path / "shared/shared").iterdir()) == []


@slow_unless_changed(
    "trainer/weights/shared", "rollout/staging/shared_weights.py", "services/trainer/shared_engine.py",
    "rollout/engines/vllm/worker.py", "trainer/megatron/convert/",
)  # fmt: skip
@pytest.mark.engine
async def test_megatron_trains_on_vllms_copy_where_both_lay_out_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """q, k and v of one key-value head lie one after the other in both."""
    greedy = ("bound.max_staleness=0", "sampling.temperature=0", "algorithm.entropy_coef=0.1")
    runs = []
    with caplog.at_level(logging.INFO, "tether"):
        for way in ("shm", "shared"):
            settings = small(tmp_path / way, *PAIRS["vllm"], *greedy, f"weights.transport={way}")
            runs.append(await run_to_end(settings, checked=False))
    assert caplog.text.count("weights.attached") == 1
    assert digests(runs[0]) == digests(runs[1])
    assert len(set(digests(runs[1]))) == 3
    exports = [tmp_path / way / "exports/step_00000003/model.safetensors" for way in ("shm", "shared")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert all(step["logprob_error_max"] < 1e-4 for run in runs for step in run.steps)
    assert list((tmp_path / "shared/shared").iterdir()) == []


@slow_unless_changed(*SHARED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_adapters_on_a_shared_base_are_those_of_a_run_by_shm(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = ("lora.rank=4", "lora.alpha=16", "trainer.num_mini_batches=2", "algorithm.kl_coef=0.1")
    greedy = ("bound.max_staleness=0", "sampling.temperature=0", "algorithm.entropy_coef=0.1")
    same = (*PAIRS["megatron"], *adapters, *greedy, f"trainer.dtype={dtype}", f"engine.dtype={dtype}")
    runs = []
    with caplog.at_level(logging.INFO, "tether"):
        for way in ("shm", "shared"):
            settings = small(tmp_path / way, *same, f"weights.transport={way}")
            runs.append(await run_to_end(settings, rollouts=2 if way == "shared" else 1, checked=False))
    assert digests(runs[0]) == digests(runs[1])
    assert len(set(digests(runs[1]))) == 3
    exports = [tmp_path / way / "exports/step_00000003/model.safetensors" for way in ("shm", "shared")]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert caplog.text.count("weights.attached") == 1
    assert list((tmp_path / "shared/shared").iterdir()) == []


@slow_unless_changed(
    "rollout/engines/megatron/",
    "rollout/engines/multi_process/shared_rank.py",
    "rollout/engines/vllm/worker.py",
    "trainer/weights/shared",
    "trainer/megatron/convert/",
)
@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        pytest.param((), "float32", id="float32"),
        pytest.param((), "bfloat16", id="bfloat16"),
        pytest.param(("lora.rank=4",), "float32", id="lora-float32"),
        pytest.param(("lora.rank=4",), "bfloat16", id="lora-bfloat16"),
        pytest.param(VLLM_ALIKE, "float32", id="vllm-float32", marks=pytest.mark.engine),
    ],
)
def test_two_ranks_of_each_have_the_weights_of_a_run_by_shm(
    tmp_path: Path, dtype: str, more: tuple[str, ...]
) -> None:
    overrides = (
        *PAIRS["megatron"], "engine.tensor_parallel_size=2", "services.restarts=0",
        "parallel.tensor_model_parallel_size=2", "bound.max_staleness=0", "sampling.temperature=0",
        "algorithm.name=reinforce_plus_plus", f"trainer.dtype={dtype}", f"engine.dtype={dtype}",
        "eval.at_end=false", "monitor.enabled=false", "trainer.checkpoint_every=2",
        "algorithm.entropy_coef=0.1", *TRAINERS_LOGPROBS, *more,
    )  # fmt: skip
    words = [word for override in overrides for word in ("--set", override)]
    demo, found = str(ROOT / "deploy/configs/demo.toml"), []
    for way in ("shm", "shared"):
        run_dir, transport = tmp_path / way, ("--set", f"weights.transport={way}")
        up = ("up", demo, "--steps", "3", "--run-dir", str(run_dir), *words, *transport)
        result = tether(*up, seconds=400)
        assert result.returncode == 0, result.stdout + result.stderr
        assert audit(run_dir)["violations"] == []
        digests = [event["digest"] for event in events(run_dir) if event["event"] == "commit"]
        files = sorted((run_dir / "exports/step_00000003").glob("*.safetensors"))
        found.append((digests, [file.read_bytes() for file in files]))
    assert found[0] == found[1]
    assert len(set(found[1][0])) == 3
    assert "weights.attached" in (tmp_path / "shared/logs/trainer.log").read_text()
    assert list((tmp_path / "shared/shared").iterdir()) == []
    assert processes_of(tmp_path / "shared") == []


@slow_unless_changed("services/settings/shared_weights.py", "services/rollout/service.py")
def test_a_pool_has_engines_that_share_and_others(tmp_path: Path) -> None:
    pool = "services.pool=[{engine={name='megatron'}}, {engine={name='hf'}}]"
    overrides = (
        *PAIRS["megatron"], "lora.rank=4", "weights.transport=shared", pool, "services.restarts=0",
        "bound.max_staleness=1", "eval.at_end=false", "monitor.enabled=false",
    )  # fmt: skip
    words = [word for override in overrides for word in ("--set", override)]
    demo = str(ROOT / "deploy/configs/demo.toml")
    result = tether("up", demo, "--steps", "4", "--run-dir", str(tmp_path), *words, seconds=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert audit(tmp_path)["violations"] == []
    log = (tmp_path / "logs/trainer.log").read_text()
    (attached,) = [line for line in log.splitlines() if "weights.attached" in line]
    applied = {event["engine"] for event in events(tmp_path) if event["event"] == "applied"}
    assert len(applied) == 2
    assert sum(f"engine={engine} " in attached for engine in applied) == 1
    assert list((tmp_path / "shared").iterdir()) == []
    assert processes_of(tmp_path) == []


@slow_unless_changed(*SHARED)
@pytest.mark.parametrize(("pair", "dtype"), [*CASES, ("hf", "bfloat16")])
async def test_versions_are_trained_while_the_engine_decodes(tmp_path: Path, pair: str, dtype: str) -> None:
    settings = small(
        tmp_path, *PAIRS[pair], "bound.max_staleness=2", "weights.transport=shared", "run.steps=6",
        f"trainer.dtype={dtype}", f"engine.dtype={dtype}", "algorithm.entropy_coef=0.1",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (6, [])
    assert run.audit.max_lag <= 2
    assert len(set(digests(run))) == 6


@slow_unless_changed(*SHARED)
async def test_a_successor_replays_without_an_engine_whatever_the_transport_is_then(tmp_path: Path) -> None:
    both = (*PAIRS["megatron"], "run.steps=6", "bound.max_staleness=0")
    for version in (2, 4):
        async with asyncio.timeout(400), running(small(tmp_path, *both, "weights.transport=shared")) as live:
            while (await live.ledger.head()).version < version:  # noqa: ASYNC110 (the ledger tells nobody)
                await asyncio.sleep(0.01)
    run = await run_to_end(small(tmp_path, *both))
    assert (run.status.version, run.audit.violations) == (6, [])
    assert [event["continued"] for event in of(run, "resume")] == [
        True
    ] * 3  # each came to the digest that was committed


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["hf", "megatron", pytest.param("vllm", marks=pytest.mark.engine)])
def test_a_run_survives_the_death_of_its_trainer_and_of_its_engine(tmp_path: Path, pair: str) -> None:
    arguments = [str(ROOT / "deploy/configs/demo.toml"), "--steps", str(STEPS), "--run-dir", str(tmp_path)]
    arguments += [word for override in (*PAIRS[pair], *KILLED) for word in ("--set", override)]
    with tether_up(*arguments, output=tmp_path / "up.log") as up:
        for number, name in ((1, "trainer"), (2, "rollout.0")):
            until(
                lambda number=number: len(epochs(tmp_path)) == number,
                seconds=180,
                what=f"a step of trainer {number}",
            )  # type: ignore[misc]
            os.kill(
                until(lambda name=name: pids(tmp_path).get(name), seconds=60, what=f"{name} in the registry"),
                signal.SIGKILL,
            )  # type: ignore[misc]
        refused = tether("scale", str(tmp_path), "rollouts=2")
        assert (refused.returncode, "there can be one rollout worker" in refused.stderr) == (2, True), (
            refused.stderr
        )
        assert up.wait(240) == 0, (tmp_path / "up.log").read_text()
    steps = read_steps(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS))
    result = audit(tmp_path)
    assert (result["code"], result["violations"], result["steps"], result["trained"]) == (
        0,
        [],
        STEPS,
        STEPS * 8,
    )
    assert all(
        event["continued"] for event in events(tmp_path) if event["event"] == "resume"
    )  # no step was made again
    assert len(epochs(tmp_path)) == 3  # the trainer ended with its engine
    assert "has ended: the trainer ends with it" in (tmp_path / "logs/trainer.log").read_text()
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("eager", ["true", "false"])
def test_vllm_and_the_reference_trainer_share_a_gpu(tmp_path: Path, eager: str) -> None:
    overrides = [
        "run.steps=6", "weights.transport=shared", "trainer.backend=reference", "trainer.dtype=bfloat16",
        "engine.dtype=bfloat16", f"engine.enforce_eager={eager}", "engine.memory_fraction=0.3",
        "eval.at_end=false", f'services.trainer_gpus="{visible_gpus()[0]}"',
        f'services.rollout_gpus="{visible_gpus()[0]}"',
    ]  # fmt: skip
    arguments = [
        str(ROOT / "deploy/configs/demo.toml"),
        *(word for override in overrides for word in ("--set", override)),
    ]
    with tether_up(*arguments, "--run-dir", str(tmp_path), output=tmp_path / "up.log") as up:
        assert up.wait(500) == 0, (tmp_path / "up.log").read_text()
    result = audit(tmp_path)
    assert (result["code"], result["violations"], result["steps"]) == (0, [], 6)
    assert list((tmp_path / "shared").iterdir()) == []


def epochs(run_dir: Path) -> set[str]:
    """Return the epochs of the trainers that have made a step."""
    return {step["epoch"] for step in read_steps(run_dir / "metrics.jsonl")}


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
