"""One run, two kinds of engine: a vLLM worker and an SGLang worker generate for the same trainer."""

import json
import signal
from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from tests.contracts.sglang_environment import STAND_INS, sglang_python
from tests.gpus import TWO_GPUS, visible_gpus
from tests.integration.command import audit, processes_of, tether_up, until
from tests.integration.loop import ROOT

SECONDS = 1200.0
"""For two engines to start and generate, on a machine that does other things too."""


def trained_by(run_dir: Path) -> set[str]:
    """Workers (rollout.0 ...) of which a group was trained."""
    leased: dict[str, str] = {}
    trained: set[str] = set()
    path = run_dir / FILE
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            break  # being written
        event = json.loads(line)
        if event["event"] == "lease":
            leased[str(event["group"])] = event["engine"].rpartition(".")[0]
        elif event["event"] == "commit":
            trained |= {leased[group] for group in event["groups"]}
    return trained


@pytest.mark.engine
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "on_gpus",
    [
        pytest.param(False, marks=pytest.mark.slow, id="cpu"),
        # an engine that starts looks at what is free on its own GPU
        pytest.param(True, marks=TWO_GPUS, id="gpu"),
    ],
)
def test_a_vllm_and_an_sglang_engine_serve_one_run(tmp_path: Path, on_gpus: bool) -> None:
    gpus = visible_gpus()[:2] if on_gpus else []
    run_dir = tmp_path / "run"
    own = 'attention_backend = "triton"' if on_gpus else f'environment = {{ PYTHONPATH = "{STAND_INS}" }}'
    sglang = f'{{ name = "sglang", python = "{sglang_python()}", {own} }}'
    overrides = (
        "run.steps=1000000",
        "trainer.backend=reference",
        "bound.groups_per_step=16",
        "rollout.groups_in_flight=8",
        "engine.start_timeout_s=600",
        "engine.memory_fraction=0.2",
        f"services.rollout_gpus={json.dumps(','.join(gpus))}",
        f"engine.dtype={'bfloat16' if on_gpus else 'float32'}",
        "eval.at_end=false",
        "services.restarts=0",
        f"services.pool=[{{ engine = {{ name = 'vllm' }} }}, {{ engine = {sglang} }}]",
    )
    words = [word for override in overrides for word in ("--set", override)]
    output = tmp_path / "up.log"
    with tether_up(
        str(ROOT / "deploy/configs/demo.toml"), "--run-dir", str(run_dir), *words, output=output
    ) as process:
        both = until(
            lambda: (
                trained_by(run_dir) if process.poll() is not None or len(trained_by(run_dir)) == 2 else None
            ),
            seconds=SECONDS,
            what="a trained group of each engine",
        )
        assert both == {"rollout.0", "rollout.1"}, output.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, output.read_text()
    found = audit(run_dir)
    assert (found["code"], found["violations"]) == (0, [])
    assert processes_of(run_dir) == []
