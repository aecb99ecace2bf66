"""Tests what a user sees of an own reward function that fails, when the run halts for it."""

from pathlib import Path

from services.ledger.event_log.archiver import FILE
from services.ledger.verify.verifier import verify
from tests.changes import slow_unless_changed
from tests.integration.command import ended_run
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")


@slow_unless_changed("services/reward.py", "services/launcher/", "reward/workers/")
def test_an_exception_reaches_the_halt_with_file_and_line(tmp_path: Path) -> None:
    source = "def score(response, metadata):\n    return 'an' in response or metadata['anwser']\n"
    (tmp_path / "own_reward.py").write_text(source)  # the response of the check before the start passes
    settings = (
        'reward.verifiers=[{name="function",options={path="own_reward:score"}}]',
        f'run.modules=["{tmp_path}"]', "bound.max_attempts=1", "bound.drop_window=4", "bound.drop_share=1.0",
        "monitor.enabled=false", "rollout.drain_s=0",
    )  # fmt: skip
    ended = ended_run(CONFIG, tmp_path / "run", settings)
    place = f"{tmp_path}/own_reward.py:2: KeyError: 'anwser'"
    assert ended.returncode == 1
    (halt,) = [line for line in ended.stderr.splitlines() if "the run halted" in line]
    assert f"verifier function: {place}" in halt
    assert "logs/reward.*.log; fix the verifier" in halt
    assert "Traceback" in (tmp_path / "run/logs/reward.0.log").read_text()
    assert verify(tmp_path / "run" / FILE).violations == []
