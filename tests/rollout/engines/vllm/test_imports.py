"""Tests what is imported before an engine starts, in processes of their own."""

import json
import os
import subprocess
import sys

from rollout.engines.vllm.core_server import SWITCH
from tests.changes import VLLM, slow_unless_changed
from tests.integration.loop import ROOT

CODE = """
import json, os, sys
from rollout.engines.base import EngineConfig
from rollout.engines.registry import import_engine
from rollout.engines.vllm.core_server import SWITCH, server_pid
if __name__ == "__main__":
    first = import_engine(EngineConfig(name="vllm", max_model_len=64))
    import torch
    loaded = [name for name in sys.modules if name.startswith(("vllm.v1", "rollout.engines.vllm"))]
    print(json.dumps({
        "loaded": loaded, "first": first.__name__,
        "switch": os.environ.get(SWITCH), "server": server_pid(), "cuda": torch.cuda.is_initialized(),
    }))
"""


@slow_unless_changed(*VLLM)
def test_importing_an_engine_loads_what_its_start_and_its_server_need() -> None:
    words = [sys.executable, "-c", CODE]
    clean = {name: value for name, value in os.environ.items() if name != SWITCH}  # other tests may set it
    done = subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, check=True, timeout=240)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert {"vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker"} <= set(facts["loaded"])
    assert "rollout.engines.vllm.worker" not in facts["loaded"]
    assert (facts["switch"], facts["server"], facts["cuda"]) == (None, None, False)
    assert facts["first"] == "fork_server"
