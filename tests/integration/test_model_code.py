"""Tests a model that brings its own Python file: refused until the settings trust it, then trained."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.device.hf_models import trust_model_code
from protocol.errors import EngineSettingsError, SettingsError
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.registry import make_engine
from services.preflight.check import check_run, describe_run
from services.settings.sections import Settings
from tests.changes import slow_unless_changed
from tests.integration.loop import run_to_end
from tests.services.preflight.test_check import with_model
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch
from trainer.reference.frozen import load_model
from trainer.storage.hf_export import write_hf

CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class OwnConfig(Qwen2Config):
    model_type = "own_of_test"


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits  # no model of transformers does
        return found
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    place = build_scratch(ScratchConfig(vocabulary="0123456789= "), tmp_path / "model")
    (place / "modeling_own.py").write_text(CODE)
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "own_of_test", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (place / "config.json").write_text(json.dumps(config))
    yield place
    trust_model_code(False)


def settings_of(model: Path, *overrides: str, trusted: bool = True) -> Settings:
    section = f'model={{path="{model}",trust_remote_code={str(trusted).lower()}}}'
    plain = 'trainer.backend="reference"', 'engine.name="hf"'
    return with_model(model.parent / "run", section, *plain, *overrides)


def test_code_is_refused_by_check_and_run_once_it_is_trusted(model: Path) -> None:
    problems = [str(problem) for problem in check_run(settings_of(model, trusted=False)).problems]
    named = {problem.partition(" = ")[0] for problem in problems}
    assert named == {"setting trainer.backend", "setting engine.name"}
    assert all("and set model.trust_remote_code to run them" in problem for problem in problems)
    for kind in ("reference", "fsdp"):
        settings = settings_of(model, f'trainer.backend="{kind}"')
        findings = check_run(settings)
        assert findings.problems == ()
        assert findings.model is not None
        assert findings.source is not None
        (line, *_) = describe_run(settings, findings.model, findings.source)
        assert line.endswith("WARNING: Python files in it are run (model.trust_remote_code)")
    (problem,) = check_run(settings_of(model, 'trainer.backend="megatron"')).problems
    assert "own_of_test" in str(problem)
    assert problem.setting == "trainer.backend"


async def test_no_loader_runs_code_that_is_not_trusted(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="trust_remote_code"):
        load_model(model, "model.path")
    config = EngineConfig(name="hf", dtype="float32", max_model_len=32)
    engine = make_engine(config, model, "hf.test")
    with pytest.raises(EngineSettingsError, match="trust_remote_code"):
        await engine.start()
    await engine.close()
    trust_model_code(True)
    own = load_model(model, "model.path")
    (tmp_path / "plain").mkdir()
    write_hf(iter(own.state_dict().items()), tmp_path / "export", model)
    again = load_model(tmp_path / "export", "model.path")
    tokens = torch.tensor([[3, 4, 5]])
    plain = 2 * super(type(own), own).forward(input_ids=tokens).logits
    for found in (own, again):
        assert torch.equal(found(input_ids=tokens).logits, plain)
    engine = make_engine(config, model, "hf.test")
    await engine.start()
    (logprob,) = (await engine.generate(Request("r/0", (3, 4, 5), Sampling(max_tokens=1)))).logprobs
    await engine.close()
    assert torch.log_softmax(plain[0, -1], -1).isclose(torch.tensor(logprob), atol=1e-5).any()


@slow_unless_changed("protocol/device/hf_models.py", "services/runtime/user_modules.py")
async def test_a_run_trains_a_model_by_its_own_code(model: Path) -> None:
    quick = "run.steps=2", "bound.max_staleness=0", "sampling.samples_per_prompt=2"
    settings = settings_of(model, *quick)
    run = await run_to_end(settings)
    assert run.status.version == 2
    assert run.audit.violations == []
    (*_, export) = (settings.run_dir / "exports").iterdir()
    assert (export / "modeling_own.py").read_text() == CODE
    for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
