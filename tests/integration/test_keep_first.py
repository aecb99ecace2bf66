"""A run that begins more samples than it trains: the first to finish are kept, and all tokens are counted."""

from pathlib import Path

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from protocol.rollout_view import cancelled_lengths
from services.tools.replay import replay_step
from services.tools.verification import verify_run
from tests.integration.loop import run_to_end, settings_for
from trainer.storage.archive import Archive

STEPS, B, N, K = 6, 4, 4, 2


async def test_the_slowest_samples_are_cancelled_and_their_tokens_counted(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run", "stragglers.toml", f"run.steps={STEPS}", f"bound.groups_per_step={B}",
        "trainer.step_s=0", "trainer.checkpoint_every=3", "engine.seconds_per_token=0.02",
        "engine.straggler_share=0", "reward.verifiers=[]", f"sampling.samples_per_prompt={N}",
        f"sampling.keep_first={K}", 'environment.name="tests.integration.uneven_turns:play"',
        'bound.staleness_policy="wait"', "trainer.archive_mb=100",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert run.audit.violations == []
    assert [step["groups"] for step in run.steps] == [B] * STEPS
    assert [step["cancelled_samples"] for step in run.steps] == [B * (N - K)] * STEPS
    for step in run.steps:
        assert step["masked_tokens"] == 0
        assert step["cancelled_length_mean"] == step["cancelled_tokens"] / step["cancelled_samples"]
    # of lengths 1 to 4 the two shorter ones are kept
    lengths = sum(step["response_length_mean"] for step in run.steps) / STEPS
    assert lengths < 2.5

    facts = verify_run(settings.run_dir)
    assert facts["violations"] == []
    assert facts["cancelled_samples"] >= B * (N - K) * STEPS
    told = [step["cancelled_tokens"] for step in run.steps]
    assert [tokens_of(settings.run_dir, step) for step in range(3)] == told[:3]
    assert facts["cancelled_tokens"] >= sum(told)
    assert replay_step(settings, 1, train=False)["equal"]

    path = settings.run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"cancelled_tokens":{told[4]}', '"cancelled_tokens":1'))
    steps = [violation.partition(":")[0] for violation in verify_run(settings.run_dir)["violations"]]
    assert "step 4" in steps


def tokens_of(run_dir: Path, step: int) -> int:
    """Tokens of cancelled samples in the archived records of a step."""
    total = 0
    for record in Archive(run_dir / "archive", 100).records(step):
        message = decode_payload(record.payload)
        assert isinstance(message, ScoredRollout)
        total += sum(cancelled_lengths(message.rollout))
    return total
