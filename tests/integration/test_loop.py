"""Whole runs with a real model: what happens to groups that cannot be scored or generated, how weights
travel, how prompts run out."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from protocol.rollout_view import decode_rollout
from protocol.topics import Role
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from services.settings.sections import Settings
from tests.integration.loop import Finished, run_to_end, running, settings_for
from trainer.storage.spool import Spool

SMALL = (
    "engine.name=hf", "trainer.backend=reference", "bound.groups_per_step=4", "sampling.samples_per_prompt=2",
    "rollout.groups_in_flight=8", "trainer.checkpoint_every=100", "run.steps=3",
)  # fmt: skip


EASY = ({"prompt": "2=", "answer": "2"}, {"prompt": "3=", "answer": "3"})


def small(run_dir: Path, *overrides: str) -> Settings:
    """A few small steps of the demo on the reference engine and trainer."""
    return settings_for(run_dir, "demo.toml", *SMALL, *overrides)


def prompts(path: Path, *rows: dict[str, str]) -> str:
    """A file of prompts, as an override."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'prompts.path="{path}"'


def of(run: Finished, name: str) -> list[dict[str, object]]:
    return [event for event in run.events if event["event"] == name]


async def test_a_group_that_cannot_be_scored_is_tried_again_then_dropped_and_never_given_a_zero(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"{i}=", "answer": "9" if i % 4 == 1 else "1"} for i in range(10)]
    settings = small(
        tmp_path / "run", 'reward.verifiers=[{name="tests.integration.failing_verifier"}]',
        "bound.max_attempts=2", "prompts.held_out=0", "prompts.shuffle=false", "prompts.passes=1",
        prompts(tmp_path / "prompts.jsonl", *rows, *EASY * 6),
    )  # fmt: skip
    run = await run_to_end(settings)
    assert run.status.version == 3
    assert run.audit.violations == []
    drops = of(run, "drop")
    assert drops
    assert {drop["group"] for drop in drops} <= {1, 5, 9}
    leases = Counter(event["group"] for event in of(run, "lease"))
    for drop in drops:
        assert leases[drop["group"]] == 2
    released = {str(event["reason"]) for event in of(run, "release") if event["group"] == 1}
    assert len(released) == 1
    assert re.fullmatch(
        r"reward:tests\.integration\.failing_verifier: "
        r"\S+failing_verifier\.py:16: RuntimeError: nine is not for me",
        released.pop(),
    )
    trained = {int(group) for event in of(run, "commit") for group in event["groups"]}  # type: ignore[attr-defined]
    assert not trained & {1, 5, 9}
    assert {drop["reason"] for drop in drops} == {"attempts"}


async def test_a_prompt_that_is_too_long_is_dropped_with_a_reason(tmp_path: Path) -> None:
    rows = [*EASY, {"prompt": "1" * 40 + "=", "answer": "1"}, *EASY * 6]
    settings = small(
        tmp_path / "run", "render.max_prompt_tokens=8", "prompts.held_out=0", "prompts.shuffle=false",
        "prompts.passes=1", prompts(tmp_path / "prompts.jsonl", *rows),
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (3, [])
    assert [(event["group"], event["reason"]) for event in of(run, "drop")] == [(2, "prompt")]


async def test_mismatch_of_engine_and_trainer_halts_a_run_that_is_to_stop_at_it(tmp_path: Path) -> None:
    settings = small(
        tmp_path / "run", "engine.dtype=bfloat16", "trainer.dtype=float32", "run.steps=1000",
        "trainer.mismatch_action=stop", "trainer.mismatch_limit=1.0001",
    )  # fmt: skip
    with pytest.raises(ExceptionGroup) as ended:
        async with running(settings) as live, asyncio.timeout(400):
            await live.trained.wait()
    halted = ended.value
    while isinstance(halted, BaseExceptionGroup):
        halted = halted.exceptions[0]
    (step,) = read_steps(tmp_path / "run/metrics.jsonl")
    assert step["token_mult_prob_error"] == step["mismatch"]["0"]["token_mult_prob_error"] > 1.0001
    assert step["warnings"][0].startswith("step 0: engine and trainer disagree on tokens of the same weights")
    assert str(halted) == f"halted: {step['warnings'][0]}"


@pytest.mark.parametrize(
    ("transport", "delta"), [("shm", False), ("disk", False), ("disk", True), ("nccl", True)]
)
async def test_every_transport_brings_every_version(tmp_path: Path, transport: str, delta: bool) -> None:
    settings = (f"weights.transport={transport}", f"weights.delta={str(delta).lower()}")
    run = await run_to_end(small(tmp_path, *settings, "bound.max_staleness=0"))
    assert (run.status.version, run.audit.violations, run.audit.max_lag) == (3, [], 0)
    assert [event["version"] for event in of(run, "applied")][:3] == [0, 1, 2]


HOST_OPTIMIZER = ("trainer.backend=megatron", "optimizer.cpu_offload=true")


@pytest.mark.parametrize("overrides", [("lora.rank=0",), ("lora.rank=4",), HOST_OPTIMIZER])
async def test_versions_are_received_while_they_are_made(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """With the optimizer in host memory that is within the step, whose parts add up all the same."""
    settings = small(
        tmp_path, "weights.transport=nccl", "bound.max_staleness=0", "run.steps=1000", *overrides
    )
    async with asyncio.timeout(400), running(settings) as live:

        def counted() -> float:
            name, event = "tether_events_total", {"event": "weights.drafts"}
            return sum(
                process.metrics.registry.get_sample_value(name, event) or 0
                for process in live.processes[Role.ROLLOUT]
            )

        while counted() < 2 or (await live.ledger.head()).version < 3:  # noqa: ASYNC110 (metrics tell nobody)
            await asyncio.sleep(0.01)
    assert verify(tmp_path / "audit.jsonl").violations == []
    for step in read_steps(tmp_path / "metrics.jsonl"):
        assert step["logprob_error_max"] < 1e-4
        parts = [step[f"{name}_s"] for name in ("wait", "train", "publish", "checkpoint", "other")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step["step_s"], abs=1e-6)


async def test_adapters_alone_are_trained_published_and_served(tmp_path: Path) -> None:
    settings = small(
        tmp_path / "run",
        "lora.rank=8",
        "bound.max_staleness=0",
        "optimizer.lr=0.03",
        "algorithm.entropy_coef=0.1",
    )
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (3, [])
    assert all(
        step["logprob_error_max"] < 1e-4 for step in run.steps
    )  # the engine computes with the trainer's own adapter
    exports = tmp_path / "run" / "exports"
    adapter, merged = (
        load_file(exports / "adapter_step_00000003/adapter_model.safetensors"),
        load_file(exports / "step_00000003/model.safetensors"),
    )
    base = load_file(settings.model_dir / "model.safetensors")
    weight = "model.layers.1.mlp.up_proj.weight"
    a, b = (adapter[f"base_model.model.{weight.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
    assert (b @ a).abs().max() > 0.01
    torch.testing.assert_close(merged[weight], base[weight] + settings.lora.scaling * b @ a)
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])


async def test_prompts_that_run_out_end_the_run_with_a_short_step(tmp_path: Path) -> None:
    rows = EASY * 3
    settings = small(
        tmp_path / "run", "prompts.held_out=0", "prompts.passes=1", "run.steps=9",
        prompts(tmp_path / "prompts.jsonl", *rows)
    )  # fmt: skip
    run = await run_to_end(settings)
    assert [step["groups"] for step in run.steps] == [4, 2]
    assert (run.status.version, run.status.trained, run.audit.violations) == (2, 6, [])


async def test_a_game_of_several_turns_trains_on_what_the_model_said(tmp_path: Path) -> None:
    settings = small(
        tmp_path, "environment.name=guess_number",
        'environment.options={max_turns=3, turn_tokens=2, higher="+", lower="-", not_a_number=" "}',
        "sampling.max_tokens=2", "reward.verifiers=[]", 'model.scratch.vocabulary="0123456789=+- "',
        "run.steps=2",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (2, [])
    records = scored(tmp_path, run)
    assert records
    inserted = 0
    for record in records:
        rollout = record.rollout
        mask, logprobs = rollout.loss_mask.numpy(), rollout.logprobs.numpy()
        assert (logprobs[mask == 0] == 0).all()
        assert rollout.environment_rewards is not None
        assert record.rewards.numpy().tolist() == rollout.environment_rewards.numpy().tolist()
        inserted += int((mask == 0).sum())
    assert inserted > 0
    sampled = {record.rollout.group: int(record.rollout.loss_mask.numpy().sum()) for record in records}
    accepted = {event["group"]: sum(event["counts"].values()) for event in of(run, "accept")}  # type: ignore[attr-defined]
    assert {group: accepted[group] for group in sampled} == sampled


async def test_a_failed_episode_costs_one_sample_and_too_many_their_group(tmp_path: Path) -> None:
    settings = small(
        tmp_path, "environment.name=tests.integration.failing_environment:play",
        "environment.options={group=1}", "environment.attempts=1", "reward.verifiers=[]",
        "sampling.samples_per_prompt=4",
        'model.scratch.vocabulary="0123456789=+ "', "run.steps=2", "bound.drop_share=1",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (2, [])
    assert {(event["group"], event["reason"]) for event in of(run, "drop")} == {(1, "episode")}
    samples = settings.sampling.samples_per_prompt
    sizes = {len(record.rewards.numpy()) for record in scored(tmp_path, run)}
    assert sizes == {samples - 2}


async def test_an_agent_that_rewrites_its_history_trains_on_all_branches(tmp_path: Path) -> None:
    settings = small(
        tmp_path, "environment.name=agent", "reward.verifiers=[]", "run.steps=2",
        'environment.options={function="tests.rollout.environments.agents:counts"}',
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (2, [])
    rollouts = [record.rollout for record in scored(tmp_path, run)]
    assert rollouts
    for rollout in rollouts:
        rows = decode_rollout(rollout).rows
        assert [row.sample for row in rows] == [0, 0, 1, 1]
        assert all(row.sampled.any() for row in rows)
    sampled = {rollout.group: int(rollout.loss_mask.numpy().sum()) for rollout in rollouts}
    accepted = {event["group"]: sum(event["counts"].values()) for event in of(run, "accept")}  # type: ignore[attr-defined]
    assert {group: accepted[group] for group in sampled} == sampled
    assert all(step["trained_tokens"] > 0 for step in run.steps)


def scored(run_dir: Path, run: Finished) -> list[ScoredRollout]:
    """What the spool holds of the accepted groups."""
    spool = Spool(run_dir / "spool.sqlite")
    try:
        records = spool.get_many([(event["group"], event["token"]) for event in of(run, "accept")])  # type: ignore[misc]
    finally:
        spool.close()
    return [
        message
        for message in (decode_payload(record) for record in records)
        if isinstance(message, ScoredRollout)
    ]
