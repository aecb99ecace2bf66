"""Tests that an audit reads a version's model, without the draft head that came with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.draft_head import PREFIX
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import write_shm
from services.audit.budget import Budget
from services.audit.live import LiveAudit
from services.audit.versions import read_version
from services.settings.sections import AuditConfig, RunConfig, Settings
from trainer.backends.base import StepStats


def test_version_with_a_draft_head_is_read_without_it(tmp_path: Path) -> None:
    model = {"a.weight": torch.randn(3, 5), "b.weight": torch.randn(7)}
    manifest = write_shm(tmp_path / "v1", {**model, f"{PREFIX}fc.weight": torch.randn(2, 2)}, 1)
    found = read_version(manifest, 10.0)
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def with_head(number: int, model: int, head: int) -> WeightManifest:
    """A version of one tensor and a head of one, by their digests."""
    tensors = tuple(
        TensorEntry(name, "float32", (2,), 0, 0, 8, digest)
        for name, digest in (("weight", model), (f"{PREFIX}fc.weight", head))
    )
    return WeightManifest(
        epoch="epoch", version=number, transport="disk", location="gone", buckets=(), tensors=tensors
    )


def test_step_that_changes_its_draft_head_alone_is_unchanged(tmp_path: Path) -> None:
    settings = Settings(
        run=RunConfig(dir=str(tmp_path)),
        audit=AuditConfig(share=1.0),
        engine=EngineConfig(drafts="model", draft_model="/head", draft_lr=1e-4),
    )
    seconds = iter([0.0])
    audit = LiveAudit(settings, Budget(1e9, lambda: next(seconds, 100.0)))
    plan = SimpleNamespace(step=3, trained_counts={})
    given: Any = (None, plan, StepStats(trained_tokens=1, loss=0.0, grad_norm=1.0), (1, 2))
    for after, found in ((with_head(4, 2, 2), 0), (None, 0), (with_head(4, 1, 2), 1)):
        audit.observe(*given, manifests=(with_head(3, 1, 1), after))
        assert audit._unchanged.count == found
    audit.observe(*given, manifests=(with_head(2, 1, 1), with_head(4, 1, 2)))  # version 3 was not published
    assert audit._unchanged.count == 0
