"""Compares what the rules make of a checkpoint with what NVIDIA's megatron-bridge makes of it, bit by bit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.megatron.families import bridge_oracle
from tests.trainer.megatron.models import make_model
from trainer.config import ParallelConfig
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Layout, Place
from trainer.megatron.loading import load_checkpoint

FAMILIES = (
    "qwen2", "qwen2-tied", "qwen3-tied", "llama", "mistral", "qwen3-moe", "gpt-oss", "gemma2",
    "gemma3",
)  # fmt: skip
"""Models of families that the bridge has with Megatron's local layers; DeepSeek and GLM-4.5 it has only with
those of TransformerEngine."""
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
"""In a name of the bridge's: the expert, which is a matrix of one of our parameters."""
NAMES = {
    "experts.linear_fc1.weight": "experts.fc1",
    "experts.linear_fc2.weight": "experts.fc2",
    "experts.linear_fc1.bias": "experts.fc1_bias",
    "experts.linear_fc2.bias": "experts.fc2_bias",
    "router.bias": "router.logit_bias",
    "core_attention.softmax_offset": "core_attention.sinks",
}
"""Ends of names, the bridge's and ours, where they differ."""
CHANGED: dict[str, dict[str, object]] = {"qwen3-moe": {"mlp_only_layers": []}}
"""What the bridge does not read."""
POST_NORMS = ("post_attention_layernorm.weight", "post_mlp_layernorm.weight")
LEFT_OUT = {"gemma2": POST_NORMS, "gemma3": POST_NORMS}
"""Parameters that the bridge has only with layers of TransformerEngine."""


def bridge_python() -> Path:
    """The interpreter that has megatron-bridge: BRIDGE_PYTHON, or that of the environment beside this one
    that `make test-slow` builds."""
    beside = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-bridge") / "bin" / "python"
    return Path(os.environ.get("BRIDGE_PYTHON") or beside)


def ours(model_dir: Path) -> dict[str, torch.Tensor]:
    """The parameters of one rank."""
    architecture = read_architecture(model_dir)
    layout = Layout.of(ParallelConfig(), architecture.layers)
    parameters = {
        rule.parameter: torch.full(rule.local_shape(layout.grid(expert=rule.expert)), float("nan"))
        for rule in stage_rules(architecture, layout, 0)
    }
    load_checkpoint(model_dir, architecture, parameters, layout, Place())
    return parameters


def same_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their parameters by our names: experts are stacked."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in theirs.items():
        if (match := EXPERT.search(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(EXPERT.sub(".", name), {})[int(match[1])] = tensor
    found |= {name: torch.stack([parts[n] for n in sorted(parts)]) for name, parts in experts.items()}
    return {renamed(name): tensor for name, tensor in found.items()}


def laid_out(model: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """One of our parameters as the bridge lays it out. Only gpt-oss differs: its experts stay as they are in
    the checkpoint, gate and up in turns, and inputs before outputs."""
    if model != "gpt-oss" or ".experts." not in name:
        return tensor
    outputs_first = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    if ".fc1" not in name:
        return outputs_first
    return torch.cat((outputs_first[:, ::2], outputs_first[:, 1::2]), 1)


def renamed(name: str) -> str:
    for theirs, our in NAMES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + our
    return name


@pytest.mark.slow
def test_a_checkpoint_becomes_what_megatron_bridge_makes_of_it(tmp_path: Path) -> None:
    python = bridge_python()
    assert python.is_file(), f"{python} is missing: build it with `make test-slow`, or set BRIDGE_PYTHON"
    models = {name: tmp_path / name for name in FAMILIES}
    for name, path in models.items():
        make_model(name, **CHANGED.get(name, {})).save_pretrained(path)
    program = [str(python), "-W", "ignore", bridge_oracle.__file__, str(tmp_path), *map(str, models.values())]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, model_dir in models.items():
        path = tmp_path / f"{name}.safetensors"
        assert path.is_file(), done.stdout
        expected, found = same_names(load_file(path)), ours(model_dir)
        left_out = {parameter for parameter in found if parameter.endswith(LEFT_OUT.get(name, ()))}
        assert found.keys() - left_out == expected.keys(), name
        for parameter in expected:
            tensor = laid_out(name, parameter, found[parameter])
            assert torch.equal(tensor, expected[parameter]), f"{name}: {parameter}"
