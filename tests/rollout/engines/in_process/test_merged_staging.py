"""Adapters that are merged into weights: a version is staged with all of them, or not at all."""

from pathlib import Path

import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.in_process.merged_staging import MergedStaging
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender

SHAPES = {f"model.layers.{number}.self_attn.q_proj.weight": (6, 4) for number in range(3)}
LORA = LoraConfig(rank=2)
TARGETS = adapter_targets(SHAPES, LORA)


@pytest.fixture
def staging() -> MergedStaging:
    base = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(SHAPES.items())}
    copy = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return MergedStaging(TARGETS, LORA.rank, base=base, copy=copy, architecture="")


@pytest.fixture
def manifest(tmp_path: Path) -> WeightManifest:
    sender = disk_sender(WeightConfig(transport="disk", directory=str(tmp_path)), tmp_path)
    adapter = {name: torch.randn(shape) for name, shape in adapter_shapes(list(TARGETS), LORA.rank).items()}
    return sender.publish("e1", 1, adapter.items())


def merged(staging: MergedStaging, target: AdapterTarget) -> torch.Tensor:
    return staging.base[target.weight] + staging.adapter[target.b] @ staging.adapter[target.a]


def test_a_merge_that_fails_leaves_no_version_staged_and_can_be_repeated(
    staging: MergedStaging, manifest: WeightManifest
) -> None:
    last = TARGETS[-1].weight
    weight, staging.base[last] = staging.base[last], torch.ones(5)
    with pytest.raises(RuntimeError, match="size"):
        staging.fetch(manifest, 30)
    assert staging.staged is None

    staging.base[last] = weight
    staging.fetch(manifest, 30)
    assert staging.take(manifest).digest == manifest.digest
    for target in TARGETS:
        assert torch.allclose(staging.copy[target.weight], merged(staging, target))


def test_a_merge_is_cancelled_between_two_weights(staging: MergedStaging, manifest: WeightManifest) -> None:
    class Cancelling(dict[str, torch.Tensor]):
        """Base whose first weight is read when the engine cancels."""

        def __getitem__(self, name: str) -> torch.Tensor:
            staging.cancel()
            return super().__getitem__(name)

    base, staging.base = staging.base, Cancelling(staging.base)
    with pytest.raises(WeightError, match="version 1 was cancelled"):
        staging.fetch(manifest, 30)
    assert staging.staged is None
    assert torch.equal(staging.copy[TARGETS[-1].weight], torch.zeros(6, 4))

    staging.base = base
    staging.fetch(manifest, 30)
    assert staging.staged is not None
