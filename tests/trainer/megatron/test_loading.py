"""Memory that a rank takes while it loads its part of a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from trainer.config import ParallelConfig
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Layout, Place
from trainer.megatron.loading import load_checkpoint

MIB = 1 << 20
SLACK = 4 * MIB
"""What the interpreter and the allocator take meanwhile."""


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


class Watched(Mapping[str, torch.Tensor]):
    """Parameters that note the process's memory whenever the next one is looked up."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self.seen: list[int] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.seen.append(anonymous_bytes())
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@pytest.mark.parametrize("tp", [1, 2])
def test_loading_takes_a_ranks_part_and_no_more_than_one_tensor(tmp_path: Path, tp: int) -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, vocab_size=4096,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    layout = Layout.of(ParallelConfig(tensor_model_parallel_size=tp), architecture.layers)
    rules = stage_rules(architecture, layout, 0)
    shapes = {name: shape for rule in rules for name, shape in rule.shapes.items()}
    save_file(
        {name: torch.full(shape, 2.0) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    largest = max(4 * torch.Size(shape).numel() for shape in shapes.values())
    grid = layout.grid(expert=False)
    parameters = Watched({rule.parameter: torch.ones(rule.local_shape(grid)) for rule in rules})
    part = sum(tensor.nbytes for tensor in parameters.values())
    before = anonymous_bytes()
    parameters.seen.clear()
    load_checkpoint(tmp_path, architecture, parameters, layout, Place(tp=tp - 1))
    assert len(parameters.seen) >= len(rules)
    assert part > 4 * (largest + SLACK)  # or a loader that keeps everything would pass
    assert max(*parameters.seen, anonymous_bytes()) - before <= largest + SLACK
    assert all(tensor.eq(2.0).all() for tensor in parameters.values())
