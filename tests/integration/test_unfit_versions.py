"""A run whose engine can take no version of its trainer: a model that its own code makes otherwise there."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.changes import LAUNCHER, slow_unless_changed
from tests.integration.command import processes_of, tether_up
from tests.integration.loop import ROOT
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

CODE = """
import os

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


class OwnConfig(Qwen2Config):
    model_type = "own_of_test"


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        is_engines = os.environ.get("TETHER_INSTANCE", "").startswith("rollout")
        self.scale = torch.nn.Parameter(torch.ones(4 if is_engines else 3))
"""
SETS = (
    "model.trust_remote_code=true",
    "trainer.backend=reference",
    "engine.name=hf",
    "run.steps=2",
)


@slow_unless_changed(*LAUNCHER, "services/rollout/weight_updater.py", "rollout/staging/")
@pytest.mark.timeout(400)
def test_a_run_whose_versions_fit_no_engine_ends_with_the_reason(tmp_path: Path) -> None:
    model = build_scratch(ScratchConfig(vocabulary="0123456789= "), tmp_path / "model")
    (model / "modeling_own.py").write_text(CODE)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own_of_test", "architectures": ["OwnForCausalLM"]}
    names = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    config["auto_map"] = {auto: f"modeling_own.{name}" for auto, name in names.items()}
    (model / "config.json").write_text(json.dumps(config))
    demo = (ROOT / "deploy/configs/demo.toml").read_text().replace("../examples", f"{ROOT}/deploy/examples")
    settings = tmp_path / "config.toml"
    settings.write_text(re.sub(r"\[model\.scratch\][^[]*", f'[model]\npath = "{model}"\n', demo))
    run, run_dir, output = f"unfit-{os.getpid()}", tmp_path / "run", tmp_path / "up.log"
    sets = [word for one in (*SETS, f"run.name={run}") for word in ("--set", one)]
    with tether_up(str(settings), "--run-dir", str(run_dir), *sets, output=output) as up:
        assert up.wait(300) == 2, output.read_text()
    text = output.read_text()
    words = (
        r"no version of this trainer fits engine rollout\.0\.\w+: tensor scale is float32\[3\], the engine's "
    )
    assert re.search(words + r"scale is float32\[4\]$", text.strip().splitlines()[-1]), text
    assert "Traceback" not in text
    assert processes_of(run_dir) == []
    assert not list(Path("/dev/shm").glob(f"tether-{run}-*"))
