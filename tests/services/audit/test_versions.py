"""Tests that an audit reads a version's model, without the draft head that came with it."""

from pathlib import Path

import torch

from protocol.weights.draft_head import PREFIX
from rollout.engines.contract.models import write_shm
from services.audit.versions import read_version


def test_version_with_a_draft_head_is_read_without_it(tmp_path: Path) -> None:
    model = {"a.weight": torch.randn(3, 5), "b.weight": torch.randn(7)}
    manifest = write_shm(tmp_path / "v1", {**model, f"{PREFIX}fc.weight": torch.randn(2, 2)}, 1)
    found = read_version(manifest, 10.0)
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
