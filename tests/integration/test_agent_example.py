"""The configurations of deploy/examples/agent: they start, and the one for a CPU learns while workers die."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.rollout_view import decode_rollout
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.registry import make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import ChatTemplate, RenderConfig, Renderer
from services.settings.load import load_settings
from services.tools.check import check_configuration
from tests.changes import slow_unless_changed
from tests.data_sets import write_model
from tests.integration.command import environment, tether
from tests.integration.loop import ROOT
from tests.rollout.tokenizers import write_tokenizer

EXAMPLE = ROOT / "deploy/examples/agent"
CONFIGURATIONS = sorted(EXAMPLE.glob("*.toml"))


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=[path.stem for path in CONFIGURATIONS])
def test_a_configuration_passes_the_check(config: Path, tmp_path: Path) -> None:
    given = [f"run.dir={tmp_path / 'run'}"]
    if config.stem != "config":
        given.append(f"model.path={write_model(tmp_path / 'model')}")
    assert check_configuration(str(config), given).problems == []
    assert f"#   tether up {config.relative_to(ROOT)}" in config.read_text().splitlines()


class Guessing(ScriptedEngine):
    """The scripted engine, but it guesses 5, and 8 when it has got a hint."""

    def __init__(self, model_dir: Path, renderer: Renderer) -> None:
        super().__init__(EngineConfig(name="scripted", max_model_len=64), model_dir, "engine.1")
        self._renderer = renderer

    async def generate(self, request: Request) -> Completion:
        told = "=" in self._renderer.text(request.prompt)
        return Completion(self._renderer.encode("8" if told else "5"), (-0.5,), ((1, 0),), "length")


@pytest.mark.parametrize(
    ("hidden", "sampled", "reward"), [("5", "5", 1.0), ("8", "5+3=8", 1.0), ("1", "5+6=8", 0.0)]
)
async def test_the_game_is_won_by_either_guess(
    hidden: str, sampled: str, reward: float, tmp_path: Path
) -> None:
    config = load_settings(str(EXAMPLE / "config.toml"), environ={}).environment
    config = replace(config, options={**config.options, "processes": 1, "directory": str(EXAMPLE)})
    renderer = Renderer(write_tokenizer(tmp_path), RenderConfig(chat_template=ChatTemplate.OFF))
    engine, environment = Guessing(tmp_path, renderer), make_environment(config)
    prompt = Prompt("?", metadata={"answer": hidden}, index=0)
    try:
        rollout = await generate_group(
            engine, renderer, environment, prompt, group=0, token="t",
            n=1, sampling=Sampling(max_tokens=1), engine_name="engine.1", config=config, max_model_len=64,
        )  # fmt: skip
    finally:
        await environment.close()
    (row,) = decode_rollout(rollout).rows
    assert (renderer.text(tuple(row.tokens.tolist())), row.environment_reward) == (sampled, reward)
    assert row.sampled.tolist() == [place in (0, 4) for place in range(len(sampled))]


@slow_unless_changed("rollout/sessions/", "protocol/network/", "tests/integration/test_agent_example.py")
def test_an_endpoint_off_loopback_serves_a_run_to_its_end(tmp_path: Path) -> None:
    keys, run_dir = tmp_path / "keys", str(tmp_path / "run")
    assert tether("keys", str(keys), "--endpoint", "127.0.0.2").returncode == 0
    trusted = f'variables={{SSL_CERT_FILE="{keys / "endpoint.crt"}"}}'
    sets = (
        f'environment.options={{command=["python", "-m", "hidden_digit"], processes=1, {trusted}}}',
        'environment.host="0.0.0.0"',
        f'environment.cert_file="{keys / "endpoint.crt"}"',
        f'environment.key_file="{keys / "endpoint.pem"}"',
        'environment.advertise="https://127.0.0.2:{port}"',
        "services.rollouts=1",
        "bound.groups_per_step=4",
        "monitor.enabled=false",
    )
    words = [word for override in sets for word in ("--set", override)]
    done = tether("up", str(EXAMPLE / "config.toml"), "--run-dir", run_dir, "--steps", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = tether("verify", run_dir)
    assert "steps 2  violations 0" in verified.stdout, verified.stdout
    calls = int(verified.stdout.split("  calls ")[1].split()[0])
    assert calls >= 2 * 4 * 8


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_model_learns_the_game_while_its_workers_are_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [str(EXAMPLE / "config.toml"), "--run-dir", str(run_dir), "--set", "monitor.enabled=false"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trials.chaos.worker_kills", *words],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith(" violations=0"), last
    assert int(last.split()[0].removeprefix("kills=")) >= 2, last
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(line["lag_max"] for line in lines) == 1
    assert sum(line["reward_mean"] for line in lines[:5]) < 5 * 0.3
