"""Tests the audit of whole runs: an engine that computes wrongly, and records of one that does not."""

import json
from pathlib import Path

import pytest

from services.audit.live import FILE
from tests.changes import slow_unless_changed
from tests.integration.command import ended_run, tether
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/demo.toml")
ENGINE = """
from pathlib import Path
from rollout.engines.hf.engine import HFEngine

class Turned(HFEngine):
    def _load(self):
        loaded = super()._load()
        loaded.decoder._model.model.rotary_emb.inv_freq.mul_(1.1)
        return loaded

class TurnedOnce(HFEngine):
    def _load(self):
        loaded, mark = super()._load(), Path(__file__).with_name("mark")
        if not mark.exists():
            loaded.decoder._model.model.rotary_emb.inv_freq.mul_(1.1)
        mark.touch()
        return loaded
"""
DEAF = """
from protocol.messages import Control
from services.bus.broadcast import Listener

receive = Listener.receive

async def without_control(self):
    while isinstance((found := await receive(self))[1], Control):
        pass
    return found

Listener.receive = without_control
"""
"""The link of a worker that is away each time that the trainer tells it something."""
VERIFIER = """
from pathlib import Path

def score(prompt, response):
    try:
        Path(__file__).with_name(f"{prompt}{response}.seen").touch(exist_ok=False)
    except FileExistsError:
        return 0.25
    return len(set(response))
"""
"""A verifier that answers otherwise when it is asked again."""
COMMON = (
    "run.steps=6", "bound.groups_per_step=4", "sampling.max_tokens=6", "trainer.backend=reference",
    "monitor.enabled=false", "eval.at_end=false", "audit.share=1", "rollout.groups_in_flight=8",
)  # fmt: skip
pytestmark = slow_unless_changed(
    "services/audit/", "services/trainer/train_loop.py", "services/rollout/", "services/settings/resume.py",
    "services/tools/recorded/run.py",
)  # fmt: skip


def up(tmp_path: Path, *settings: str, engine: str = ENGINE) -> tuple[int, str]:
    """Run the demo's job on the reference engine; returns the exit code and all that it printed."""
    (tmp_path / "turned.py").write_text(engine)
    (tmp_path / "stateful.py").write_text(VERIFIER)
    given = [*COMMON, f'run.modules=["{tmp_path}"]', *settings]
    ended = ended_run(CONFIG, tmp_path / "run", given)
    return ended.returncode, ended.stdout + ended.stderr


def alarms(tmp_path: Path) -> list[dict[str, object]]:
    """The lines of alarms.jsonl."""
    path = tmp_path / "run" / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_run_without_a_fault_is_made_again_bit_for_bit_without_an_alarm(tmp_path: Path) -> None:
    code, said = up(tmp_path, "engine.name=hf")
    assert code == 0, said
    assert alarms(tmp_path) == []
    verified = tether("verify", str(tmp_path / "run"), "--numerics", "--json")
    assert verified.returncode == 0, verified.stdout
    facts = json.loads(verified.stdout)
    assert (facts["numerics_steps"], facts["numerics_exact"], facts["alarms"]) == (6, 6, [])


def test_run_that_continued_under_other_settings_has_no_alarm(tmp_path: Path) -> None:
    for given in (("run.steps=3",), ("run.steps=6", "sampling.temperature=0.6", "optimizer.lr=1e-2")):
        code, said = up(tmp_path, "engine.name=hf", "trainer.checkpoint_every=2", *given)
        assert code == 0, said
    verified = tether("verify", str(tmp_path / "run"), "--numerics", "--json")
    facts = json.loads(verified.stdout)
    assert (verified.returncode, facts["alarms"]) == (0, [])
    assert (facts["numerics_steps"], facts["numerics_exact"]) == (3, 3)
    assert "steps from 3 on were made under other settings: sampling.temp" in facts["numerics_not_held"]
    for step in (1, 4):  # before the change, and after it
        replayed = tether("replay", str(tmp_path / "run"), "--step", str(step), "--train", "--json")
        assert replayed.returncode == 0, replayed.stdout
        assert json.loads(replayed.stdout)["train"]["weights_equal"]


def test_engine_that_computes_wrongly_halts_the_run_and_is_named(tmp_path: Path) -> None:
    code, said = up(tmp_path, "engine.name=turned:Turned", "audit.action=stop", "run.steps=200")
    found = alarms(tmp_path)
    assert code == 1, said
    assert "audit.logprob" in said
    assert found[0]["check"] == "logprob"
    assert "engine" in found[0]["where"]
    verified = tether("verify", str(tmp_path / "run"), "--numerics")
    assert verified.returncode == 1
    assert "alarm: audit.logprob" in verified.stdout


def test_verifier_that_scores_otherwise_the_second_time_halts_the_run_and_is_named(tmp_path: Path) -> None:
    function = '[{name="function", options={path="stateful:score"}}]'
    code, said = up(
        tmp_path, "engine.name=hf", f"reward.verifiers={function}", "audit.action=stop", "run.steps=200"
    )
    found = alarms(tmp_path)
    assert code == 1, said
    assert "audit.reward" in said
    assert (found[0]["check"], found[0]["where"]["scorer"][:6]) == ("reward", "reward")  # type: ignore[index]
    assert "the verifiers give 0.25" in str(found[0]["detail"])


@pytest.mark.parametrize("heard", [True, False])
def test_engine_that_an_audit_refutes_is_replaced_and_the_run_is_completed(
    tmp_path: Path, heard: bool
) -> None:
    engine = ENGINE if heard else ENGINE + DEAF
    settings = ("engine.name=turned:TurnedOnce", "audit.action=quarantine", "run.steps=60")
    code, said = up(tmp_path, *settings, engine=engine)
    assert code == 0, said
    engines = {alarm["where"]["engine"] for alarm in alarms(tmp_path) if alarm["check"] == "logprob"}  # type: ignore[index]
    assert len(engines) == 1
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("rollout*.log"))
    assert f"an audit refutes {'this engine' if heard else next(iter(engines))}" in logs
    assert json.loads(tether("verify", str(tmp_path / "run"), "--json").stdout)["violations"] == []
    events = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    leased = [event["engine"] for event in events if event["event"] == "lease"]
    assert (len(set(leased)), leased[-1] in engines) == (2, False)
