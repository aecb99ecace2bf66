"""A recorded run that is made again: the same tokens under the same versions, also where a commit fell into a
sample, and forks of it."""

import asyncio
from pathlib import Path

import pytest

from protocol.errors import SettingsError, TetherError
from services.ledger.event_log.hash_chain import damaged_lines
from services.run_record.end import describe_ended_run
from services.run_record.steps import read_lines, read_steps
from services.settings.load import dump_settings, run_settings
from services.settings.resume import Change, keep_earlier
from services.tools.recorded.comparison import compare_runs
from services.tools.recorded.rerun import rerun
from services.tools.recorded.run import RecordedRun
from services.tools.replay import replay_step
from tests.changes import slow_unless_changed
from tests.integration.loop import run_to_end, settings_for
from tests.integration.test_deterministic import OVERRIDES, STEPS

CHANGES = slow_unless_changed(
    "services/tools/recorded/", "services/tools/replay.py", "rollout/engines/hf/",
    "rollout/engines/in_process/", "rollout/seeds.py", "trainer/backends/", "trainer/execution/",
    "trainer/step/", "protocol/messages/",
)  # fmt: skip
TWO_TURNS = (
    "run.lockstep=false",
    "environment.name=tests.trials.silent.world:TwoTurns",
    "sampling.max_tokens=12",
    "rollout.groups_in_flight=3",
)
TO = 5
SAME = ("step", "version", "epoch", "groups", "batch_digest", "loss", "grad_norm", "reward_mean",
        "trained_tokens", "masked_tokens", "lag_max", "wasted_tokens", "dropped_groups")  # fmt: skip


def assert_lines_are_of_steps(made: Path, recorded: Path, equal: int) -> None:
    """Check metrics.jsonl of a rerun, whose first `equal` steps equal the recorded run's."""
    lines, old = list(read_lines(made / "metrics.jsonl")), read_steps(recorded / "metrics.jsonl")
    assert list(damaged_lines(made / "metrics.jsonl")) == []
    assert [line["step"] for line in lines] == list(range(len(lines)))
    for line, before in zip(lines, old, strict=False):
        names = SAME if line["step"] < equal else ("step", "version", "epoch", "groups", "trained_tokens")
        assert {name: line[name] for name in names} == {name: before[name] for name in names}
        assert line["time"] > before["time"]
        assert 0 < line["train_s"] < line["step_s"]
        assert (line["wait_s"] > 0) == (line["step"] < equal)
        assert line["tokens_per_s"] > 0
    facts = replay_step(run_settings(made), equal - 1, train=True)
    assert facts["equal"]
    assert facts["train"]["equal"]
    assert facts["train"]["weights_equal"]


@CHANGES
def test_rerun_of_an_asynchronous_run_is_equal_and_can_be_forked(tmp_path: Path) -> None:
    run_dir, again, fork = (tmp_path / name for name in ("run", "again", "fork"))
    settings = settings_for(run_dir, "demo.toml", *OVERRIDES, *TWO_TURNS)
    asyncio.run(run_to_end(settings, rollouts=2))
    dump_settings(settings, run_dir / "settings.json")
    recorded = RecordedRun(settings, range(STEPS))
    groups = [group for step in recorded.steps for group in recorded.step(step).record.groups]
    assert any(len(group.counts) > 1 for group in groups)  # a commit fell into a sample

    facts = rerun(run_settings(run_dir), TO, again)
    assert (facts["steps"], facts["equal"]) == (TO, TO)
    compared = compare_runs(run_dir, again)
    assert (compared["versions"], compared["made"], compared["difference"]) == (TO, [STEPS, TO], None)
    assert (run_dir / "audit.jsonl").read_bytes().startswith((again / "audit.jsonl").read_bytes())

    assert_lines_are_of_steps(again, run_dir, equal=TO)

    facts = rerun(run_settings(run_dir), TO, fork, ["algorithm.clip_high=0.01"])
    assert (facts["steps"], facts["equal"], facts["forked"]) == (TO, TO, STEPS - TO)
    forked = RecordedRun(run_settings(fork), range(STEPS))
    assert [forked.settings_of(step).algorithm.clip_high for step in (TO - 1, TO)] == [0.2, 0.01]
    compared = compare_runs(run_dir, fork)
    assert compared["made"] == [STEPS, STEPS]
    assert "algorithm.clip_high" in compared["settings"][0]
    assert_lines_are_of_steps(fork, run_dir, equal=TO)
    assert replay_step(run_settings(fork), STEPS - 1, train=False)["equal"]
    why = describe_ended_run(run_settings(fork))["why"]
    assert why == f"fork of {run_dir} from version {TO} on, with algorithm.clip_high=0.01"

    for to, overrides, versions in (
        (0, [], "1 to 8"), (-1, [], "1 to 8"), (-1, ["algorithm.clip_high=0.01"], "0 to 8"), (9, [], "1 to 8")
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=rf"--to {to}: give a version from {versions} of .*run"):
            rerun(run_settings(run_dir), to, tmp_path / "none", overrides)
        assert not (tmp_path / "none").exists()

    whole = tmp_path / "whole"  # a fork has steps also from version 0 on
    assert rerun(run_settings(run_dir), 0, whole, ["algorithm.clip_high=0.01"])["forked"] == STEPS
    assert list(damaged_lines(whole / "audit.jsonl")) == list(damaged_lines(whole / "metrics.jsonl")) == []

    other_seed = settings_for(run_dir, "demo.toml", *OVERRIDES, *TWO_TURNS, "trainer.seed=1")
    with pytest.raises(TetherError, match=r"group \d+, sample \d+, token .* was generated"):
        rerun(other_seed, TO, tmp_path / "other")
    assert not (tmp_path / "other").exists()

    end = recorded.step(1).sequence
    keep_earlier(run_dir, end, [Change("optimizer.lr", 1e-3, 1e-2)])
    dump_settings(
        settings_for(run_dir, "demo.toml", *OVERRIDES, *TWO_TURNS, "optimizer.lr=1e-2"),
        run_dir / "settings.json",
    )
    with pytest.raises(SettingsError, match=r"beyond version 2, .*optimizer.lr .* -> 0.01"):
        rerun(run_settings(run_dir), 3, tmp_path / "third")
    facts = rerun(run_settings(run_dir), 2, tmp_path / "third")
    assert (facts["steps"], facts["equal"]) == (2, 2)


def test_rerun_refuses_a_run_without_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "audit.jsonl").touch()
    with pytest.raises(SettingsError, match=r"run cannot be made again: no step of it is in its log"):
        rerun(settings_for(run_dir, "demo.toml", *OVERRIDES, *TWO_TURNS), None, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("run.deterministic=false", "run.deterministic"),
        ("engine.name=vllm", "engine 'hf'"),
        ("lora.rank=4", "lora.rank"),
        ("engine.kv=keep", "engine.kv"),
        ('reward.verifiers=[{name="judge"}]', "judges"),
    ],
)
def test_rerun_refuses_what_it_cannot_generate_again(tmp_path: Path, override: str, cause: str) -> None:
    settings = settings_for(tmp_path / "run", "demo.toml", *OVERRIDES, *TWO_TURNS, override)
    with pytest.raises(SettingsError, match=cause):
        rerun(settings, None, tmp_path / "again")
    assert not (tmp_path / "again").exists()
