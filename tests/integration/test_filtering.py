"""A run that filters groups without signal: every step has B groups with one, nothing of the rest is trained,
and log, metrics, replay and pass rates agree."""

import json
from collections import Counter
from pathlib import Path

import pytest

from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import trace
from services.settings.load import dump_settings
from services.tools.pass_rates import write_pass_rates
from services.tools.replay import replay_step
from tests.integration.loop import run_to_end, settings_for

STEPS, B = 6, 4


async def test_steps_are_of_groups_with_signal_alone(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run", "stragglers.toml", f"run.steps={STEPS}", f"bound.groups_per_step={B}",
        "trainer.step_s=0", "trainer.checkpoint_every=3", "engine.seconds_per_token=0.001",
        'reward.verifiers=[{name="function", options={path="tests.integration.uneven_reward:score"}}]',
        "algorithm.filter_groups=true", 'algorithm.truncated="shape"', "algorithm.overlong_buffer=4",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert run.audit.violations == []
    assert [step["groups"] for step in run.steps] == [B] * STEPS
    accepted = {event["group"]: event["reward"] for event in run.events if event["event"] == "accept"}
    assert set(accepted.values()) == {0.5}
    drops = [event for event in run.events if event["event"] == "drop" and event["reason"] == "no_signal"]
    assert drops
    assert {event["reward"] for event in drops} <= {0.0, 1.0}
    status = run.status
    assert status.dropped_by_reason["no_signal"] == len(drops)
    assert status.wasted_by_reason["no_signal"] == sum(event["wasted_tokens"] for event in drops) > 0

    reported = Counter(step["filtered_groups"] for step in run.steps)
    assert 0 < sum(count * times for count, times in reported.items()) <= len(drops)
    for step in run.steps:
        assert step["filtered_share"] == pytest.approx(
            step["filtered_groups"] / (step["filtered_groups"] + B)
        )
        assert step["reward_mean"] == 0.5
        assert step["shaped_reward_mean"] <= step["reward_mean"]
        assert 0 <= step["truncated_share"] <= 1
    assert min(step["shaped_reward_mean"] for step in run.steps) < 0.5

    facts = replay_step(settings, 1, train=False)
    assert facts["equal"]
    moments = trace(read_events(settings.run_dir / "audit.jsonl"), drops[0]["group"])
    assert (moments[-1].event, moments[-1].facts["reason"]) == ("drop", "no_signal")

    dump_settings(settings, settings.run_dir / "settings.json")
    written = write_pass_rates(settings, tmp_path / "rates.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rates.jsonl").read_text().splitlines()]
    assert written["observed"] == len(accepted) + len(drops)
    assert Counter(row["pass_rate"] for row in rows if "pass_rate" in row) == Counter(
        [*accepted.values(), *(event["reward"] for event in drops)]
    )
