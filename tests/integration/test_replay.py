"""`tether replay` and `tether trace` on runs that are over: what they say is what was trained, and they find
what was changed."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError, TetherError
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import committed_steps, read_events
from services.ledger.event_log.trace import render_trace, trace
from services.run_record.steps import read_steps
from services.settings.load import dump_settings, run_settings
from services.settings.sections import Settings
from services.tools.replay import COMPARED, render_replay, replay_step
from tests.integration.loop import run_to_end, settings_for

pytestmark = pytest.mark.xdist_group("replay")  # what the module sets up once, not one for each process

STEPS = 12


@pytest.fixture(scope="module")
async def over(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A dry run with stragglers and several updates a step: some steps are archived, others in the spool."""
    settings = settings_for(
        tmp_path_factory.mktemp("replay") / "run", "stragglers.toml", f"run.steps={STEPS}",
        "trainer.checkpoint_every=4", "trainer.step_s=0", "engine.seconds_per_token=0.001",
        "trainer.epochs_per_batch=2", "trainer.num_mini_batches=2",
    )  # fmt: skip
    run = await run_to_end(settings)
    assert (run.status.version, run.audit.violations) == (STEPS, [])
    dump_settings(settings, settings.run_dir / "settings.json")
    return settings


def copied(settings: Settings, to: Path) -> Settings:
    """The run in another directory, to be damaged."""
    shutil.copytree(settings.run_dir, to, ignore=shutil.ignore_patterns("lock", "ledger"))
    return run_settings(to)


def rewrite(path: Path, change: dict[str, Any], **which: Any) -> None:
    """Change the first line of a file of JSON lines in which all of `which` stand."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if which.items() <= line.items()).update(change)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("step", [0, 3, 4, 7, 8, STEPS - 1])
def test_a_step_is_built_again_and_repeated_bit_for_bit(over: Settings, step: int) -> None:
    facts = replay_step(over, step, train=True)
    line = read_steps(over.run_dir / "metrics.jsonl")[step]
    assert facts["equal"]
    assert facts["digest"] == line["batch_digest"] != ""
    assert (facts["trained_tokens"], facts["masked_tokens"], facts["lag_max"]) == (
        line["trained_tokens"], line["masked_tokens"], line["lag_max"],
    )  # fmt: skip
    train = facts["train"]
    assert train["loss"] == line["loss"]
    assert train["weights_equal"]
    assert train["equal"]
    assert train["from_version"] == max(version for version in (0, 8) if version <= step)
    assert (over.run_dir / f"archive/step_{step:08d}.msgpack").exists() == (step < 8)
    text = render_replay(facts)
    assert f"digest {line['batch_digest']}, recorded {line['batch_digest']}, equal yes" in text


def test_every_step_has_another_digest(over: Settings) -> None:
    lines = read_steps(over.run_dir / "metrics.jsonl")
    assert len({line["batch_digest"] for line in lines}) == STEPS


def test_a_step_that_was_not_made_is_said_so(over: Settings) -> None:
    with pytest.raises(SettingsError, match=f"step {STEPS} is not in the log"):
        replay_step(over, STEPS, train=False)


def test_a_step_that_the_archive_has_forgotten_is_said_so(over: Settings, tmp_path: Path) -> None:
    settings = copied(over, tmp_path / "run")
    (settings.run_dir / "archive/step_00000002.msgpack").unlink()
    with pytest.raises(SettingsError, match=r"step 2 cannot be built again.*steps 0 to 7.*archive_mb"):
        replay_step(settings, 2, train=False)
    with pytest.raises(SettingsError, match="step 2 cannot be built again"):
        replay_step(settings, 3, train=True)
    assert replay_step(settings, 3, train=False)["equal"]


def test_a_damaged_record_is_found(over: Settings, tmp_path: Path) -> None:
    settings = copied(over, tmp_path / "run")
    path = settings.run_dir / "archive/step_00000003.msgpack"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TetherError, match="damaged"):
        replay_step(settings, 3, train=False)


def test_a_log_that_says_something_else_is_found(over: Settings, tmp_path: Path) -> None:
    settings = copied(over, tmp_path / "run")
    log = settings.run_dir / FILE
    groups = committed_steps(read_events(log), range(3, 4))[3].record.groups
    rewrite(log, {"groups": [group.group for group in reversed(groups)]}, event="take", step=3)
    facts = replay_step(settings, 3, train=False)
    assert not facts["equal"]
    assert facts["tokens_equal"]
    assert "equal no" in render_replay(facts)
    rewrite(settings.run_dir / "metrics.jsonl", {"loss": 7.0}, step=5)
    assert not replay_step(settings, 5, train=True)["train"]["equal"]


async def test_a_real_model_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, "demo.toml", "engine.name=hf", "trainer.backend=reference", "bound.groups_per_step=4",
        "sampling.samples_per_prompt=2", "rollout.groups_in_flight=8", "trainer.checkpoint_every=2",
        "trainer.keep_checkpoints=1", "run.steps=5", "algorithm.entropy_coef=0.01",  # so that all steps learn
    )  # fmt: skip
    run = await run_to_end(settings)
    for step in (1, 4):
        facts = replay_step(settings, step, train=True)
        assert facts["equal"]
        assert facts["train"]["loss"] == run.steps[step]["loss"]
        assert facts["train"]["weights_equal"]
    dump_settings(settings, settings.run_dir / "settings.json")
    check_other_loss(settings, run.steps[3])


def check_other_loss(settings: Settings, line: dict[str, Any]) -> None:
    """A step that is made again under its own loss comes out the same, and otherwise under another."""
    same = replay_step(settings, 3, train=True, overrides=["algorithm.entropy_coef=0.01"])["train"]
    assert (same["equal"], same["weights_equal"]) == (True, True)
    assert same["other"] == same["repeated"]
    assert same["recorded"] == {name: line[name] for name in COMPARED}
    assert same["repeated"] == same["recorded"] | {"update_norm": same["repeated"]["update_norm"]}
    assert same["repeated"]["update_norm"] > 0
    facts = replay_step(
        settings, 3, train=True, overrides=["algorithm.name=dr_grpo", "algorithm.entropy_coef=0.5"]
    )
    other = facts["train"]["other"]
    assert facts["train"]["weights_equal"]  # the recorded step is repeated as it was
    assert facts["train"]["repeated"] == same["repeated"]
    assert other["entropy"] == pytest.approx(same["other"]["entropy"])  # the same samples and weights
    assert other["grad_norm"] != pytest.approx(same["other"]["grad_norm"], rel=1e-3)
    text = render_replay(facts).splitlines()
    assert "made again with algorithm.name=dr_grpo, algorithm.entropy_coef=0.5:" in text
    assert text[-1].split() == [
        "update_norm", "-", f"{same['repeated']['update_norm']:.6g}", f"{other['update_norm']:.6g}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "train", "said"),
    [
        (
            "bound.groups_per_step=2",
            True,
            r"--set bound\.groups_per_step=2: a step is made again from the samp",
        ),
        ("optimizer.lr=1", True, "under another .algorithm., or trainer.recompute_logprobs"),
        ("algorithm.clip_low=7", True, "algorithm.clip_low"),
        ("algorithm.clip_low=0.1", False, "add --train"),
    ],
)
def test_settings_that_a_step_cannot_be_made_again_with_are_refused(
    over: Settings, override: str, train: bool, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        replay_step(over, 3, train=train, overrides=[override])


def test_a_trained_group_is_traced_from_lease_to_commit(over: Settings) -> None:
    log = over.run_dir / FILE
    group = committed_steps(read_events(log), range(5, 6))[5].record.groups[0]
    moments = trace(read_events(log), group.group)
    lived = [moment.event for moment in moments if moment.event not in ("expire", "extend")]
    assert lived == ["lease", "accept", "take", "commit"]
    lease, accept, take, commit = [moment for moment in moments if moment.event in lived]
    assert (lease.facts["token"], lease.facts["version"], lease.facts["deadline"]) == (
        group.token,
        group.version,
        group.deadline,
    )
    assert lease.facts["holder"].startswith("rollout.0")
    assert accept.facts["counts"] == {str(version): n for version, n in group.counts.items()}
    assert 0 <= accept.facts["reward"] <= 1
    assert (take.facts["step"], take.facts["place"]) == (5, 0)
    assert commit.facts["lag_max"] <= group.max_staleness
    assert commit.state == "trained"
    assert [moment.time_ms for moment in moments] == sorted(moment.time_ms for moment in moments)
    assert [moment.since_ms for moment in moments[1:]] == [
        b.time_ms - a.time_ms for a, b in itertools.pairwise(moments)
    ]
    text = render_trace(group.group, moments)
    assert text.startswith(f"group {group.group}: trained after 1 lease, ")
    assert len(text.splitlines()) == len(moments) + 1


def test_a_group_that_the_log_does_not_name_has_no_life(over: Settings) -> None:
    assert trace(read_events(over.run_dir / FILE), 10**9) == []
