"""Tests what a user sees of own code that passes the check and fails in the middle of a run."""

from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify
from tests.changes import slow_unless_changed
from tests.integration.command import ended_run, tether_here
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")
CODE = """
from trainer.algorithms.grpo import Grpo

steps = []

class Tired(Grpo):
    def advantages(self, rewards, group_index):
        steps.append(rewards)
        return super().advantages(rewards, group_index) / (3 - len(steps))

seen = []

def keep(*, rewards):
    seen.append(rewards)
    return [True][len(seen) // 9]
"""


ENVIRONMENT = """
async def play(episode):
    await episode.generate()
    return {}["reward"]
"""


@slow_unless_changed("services/rollout/", "services/run_record/", "rollout/environments/")
def test_an_environment_that_fails_halts_the_run_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text(ENVIRONMENT)
    settings = (
        "environment.name=my_game:play", f'run.modules=["{tmp_path}"]', "bound.drop_window=4",
        "bound.drop_share=1.0", "monitor.enabled=false", "rollout.drain_s=0",
    )  # fmt: skip
    ended = ended_run(CONFIG, tmp_path / "run", settings)
    place = f"{tmp_path}/my_game.py:4: KeyError: 'reward'"
    assert ended.returncode == 1
    (halt,) = [line for line in ended.stderr.splitlines() if "the run halted" in line]
    assert place in halt
    assert "logs/rollout.*.log (episode.failed); fix the environment" in halt
    assert place in tether_here("status", tmp_path / "run").stdout
    assert verify(tmp_path / "run" / FILE).violations == []


@slow_unless_changed("services/runtime/", "services/launcher/", "trainer/algorithms/")
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algorithm.name=tired:Tired", "advantages() has -inf for sample 0; return finite numbers"),
        ("algorithm.group_filter=tired:keep", "tired.py:15: IndexError: list index out of range"),
    ],
)
def test_own_code_that_fails_ends_the_run_with_its_place(tmp_path: Path, setting: str, words: str) -> None:
    (tmp_path / "tired.py").write_text(CODE)
    settings = (
        setting, "algorithm.filter_groups=true", f'run.modules=["{tmp_path}"]', "monitor.enabled=false",
        "rollout.drain_s=0",
        'reward.verifiers=[{name="function", options={path="tests.integration.uneven_reward:score"}}]',
    )  # fmt: skip
    ended = ended_run(CONFIG, tmp_path / "run", settings)
    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert f"setting {setting.partition('=')[0]}: tired:" in ended.stderr
    assert verify(tmp_path / "run" / FILE).violations == []
