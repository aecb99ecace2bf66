"""Harnesses that attack the endpoint of a run in progress: the run continues, and their samples count."""

from pathlib import Path

from services.ledger.verify.verifier import verify
from services.observability.steps import read_steps
from tests.integration.loop import running, settings_for


async def test_a_run_continues_whatever_comes_to_its_endpoint(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run",
        "stragglers.toml",
        "run.steps=2",
        "bound.groups_per_step=2",
        "sampling.samples_per_prompt=2",
        "engine.straggler_share=0.0",
        'environment.name="agent"',
        'environment.options={function="tests.security.hostile_agent:attacks", body_mb=1}',
        "environment.attempts=1",
    )
    async with running(settings) as live:
        await live.trained.wait()
    steps = read_steps(settings.run_dir / "metrics.jsonl")
    assert [step["reward_mean"] for step in steps] == [1.0, 1.0]
    result = verify(settings.run_dir / "audit.jsonl")
    assert result.ok, result.violations[:5]
    assert result.steps == 2
