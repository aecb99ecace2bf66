"""Tests that `tether pass-rates` writes what was observed last, and a file that a new run can read."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.lifecycle import GroupState
from protocol.staleness import Policy
from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source
from services.ledger.event_log.events import AcceptEvent, CreateEvent, DropEvent, LedgerEvent
from services.settings.sections import RunConfig, Settings
from services.tools.pass_rates import render_pass_rates, write_pass_rates
from tests.contracts.memory_ledger.event_fields import fields_of

ROWS = [{"question": f"q{i}", "solution": f"#### {i}", "level": i} for i in range(6)]


def accept(group: int, reward: float) -> AcceptEvent:
    return AcceptEvent(group=group, token="t", counts={0: 1}, reward=reward)


def drop(group: int, reason: str, reward: float | None = None) -> DropEvent:
    return DropEvent(
        group=group, token="t", reason=reason, detail="", wasted_tokens=1, from_state=GroupState.LEASED,
        reward=reward,
    )  # fmt: skip


def run_of(tmp_path: Path, events: list[LedgerEvent], **prompts: Any) -> Settings:
    """A run on `ROWS` in their order, of which the last is held out, with this event log."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = PromptConfig(
        path=str(data), prompt_field="question", answer_field="solution", answer_pattern="#### (.+)",
        shuffle=False, held_out=1, **prompts,
    )  # fmt: skip
    settings = Settings(run=RunConfig(dir=str(tmp_path / "run")), prompts=config)
    settings.run_dir.mkdir()
    create = CreateEvent(
        fingerprint=make_source(config).fingerprint, prompts=-1, steps=9, max_staleness=1, groups_per_step=1,
        policy=Policy.WAIT,
    )  # fmt: skip
    lines = [json.dumps(fields_of(event)) + "\n" for event in (create, *events)]
    (settings.run_dir / "audit.jsonl").write_text("".join(lines))
    return settings


def test_prompts_have_the_rate_that_was_observed_last(tmp_path: Path) -> None:
    """Groups 0 to 4 are the first pass, 5 to 9 the second."""
    events = [accept(0, 0.25), drop(1, "no_signal", 1.0), drop(2, "stale"), accept(5, 0.75), accept(3, 0.5)]
    settings = run_of(tmp_path, [*events, accept(3, 0.125)])
    facts = write_pass_rates(settings, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row.get("pass_rate") for row in rows] == [0.75, 1.0, None, 0.125, None, None]
    assert rows[1] == {
        "prompt": "q1", "solution": "#### 1", "level": 1, "answer": "1", "pass_rate": 1.0
    }  # fmt: skip
    assert (facts["prompts"], facts["observed"], facts["mean"]) == (5, 3, 0.625)
    assert 'prompt_field = "prompt"' in render_pass_rates(facts)


def test_a_new_run_reads_the_file_by_the_settings_that_are_printed(tmp_path: Path) -> None:
    settings = run_of(tmp_path, [accept(0, 0.25), drop(1, "no_signal", 0.0)])
    facts = write_pass_rates(settings, tmp_path / "out.jsonl")
    config = PromptConfig(**facts["settings"], shuffle=False, min_pass_rate=0.1, passes=1)
    source, before = make_source(config), make_source(settings.prompts)
    assert [source.at(i).text for i in range(source.size or 0)] == ["q0", "q2", "q3", "q4"]
    assert [prompt.text for prompt in source.held_out()] == [prompt.text for prompt in before.held_out()]
    assert source.at(0).metadata["answer"] == before.at(0).metadata["answer"] == "0"


def test_a_field_of_the_rows_is_not_overwritten_by_the_question(tmp_path: Path) -> None:
    settings = run_of(tmp_path, [accept(0, 0.25)], template="Solve {question}")
    facts = write_pass_rates(settings, tmp_path / "out.jsonl")
    assert facts["settings"]["prompt_field"] == "prompt"
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert (row["prompt"], row["question"]) == ("Solve q0", "q0")


def test_nothing_is_overwritten_and_a_run_without_scores_is_refused(tmp_path: Path) -> None:
    settings = run_of(tmp_path, [drop(0, "stale")])
    with pytest.raises(SettingsError, match=r"no group of .* was scored yet"):
        write_pass_rates(settings, tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(SettingsError, match=r"out\.jsonl exists"):
        write_pass_rates(settings, tmp_path / "out.jsonl")


@pytest.mark.parametrize("rows", [[{**ROWS[5], "question": "new"}, *ROWS], ROWS[:3]])
def test_prompts_that_are_not_those_of_the_run_are_refused(tmp_path: Path, rows: list[Any]) -> None:
    settings = run_of(tmp_path, [accept(0, 0.25), accept(4, 1.0)])
    recorded, data = make_source(settings.prompts).fingerprint, tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    now = make_source(settings.prompts).fingerprint
    with pytest.raises(SettingsError, match=rf"prompts in {data} have .* {now}, .* run {recorded}: put back"):
        write_pass_rates(settings, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
