"""The benchmark with a real trainer, without a GPU: two ranks on gloo, a tiny model, the real engine. No
timing is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu.partner import ROOT
from tests.benchmarks.gpu_reshard.orders import held_by
from tests.changes import slow_unless_changed


@pytest.mark.parametrize(
    ("name", "shape", "shares"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (8,), [0.5, 0.5]),
        ("model.layers.0.mlp.down_proj.weight", (4, 6), [0.5, 0.5]),
        ("lm_head.weight", (8, 4), [0.5, 0.5]),
        ("model.norm.weight", (4,), [1.0, 1.0]),
    ],
)
def test_engine_ranks_hold_disjoint_parts_or_all_of_a_tensor(
    name: str, shape: tuple[int, ...], shares: list[float]
) -> None:
    tensor = torch.ones(shape)
    parts = [held_by(name, tensor, rank, 2) for rank in range(2)]
    assert [float(part.mean()) for part in parts] == shares
    assert torch.equal(torch.maximum(*parts), tensor)


@slow_unless_changed("tests/benchmarks/gpu_reshard/", "tests/benchmarks/gpu/", "trainer/megatron/part.py")
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "nccl", "ipc"])
def test_tiny_run_brings_the_weights_of_two_ranks_to_engines_of_one_and_two(
    tmp_path: Path, transport: str
) -> None:
    out = tmp_path / "bench.json"
    options = f"--tiny --engines vllm:1,vllm:2 --minutes 14 --transport {transport} --out {out}"
    command = [sys.executable, "-m", "tests.benchmarks.gpu_reshard.run", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    facts = json.loads(out.read_text())
    assert facts["failed"] == {}, done.stderr[-4000:]
    assert done.returncode == 0
    assert facts["trainer"]["by_rank"] is True
    assert list(facts["parts"]) == ["vllm:1 host", "vllm:1 gpu", "vllm:2 host", "vllm:2 gpu"]
    for name, part in facts["parts"].items():
        assert part["verified"] is True
        assert part["gaps"]["undisturbed"]["n"] > 0
        assert f"| {name}" in done.stdout
