"""Tests how a rank of the engine takes versions out of the masters of the same rank of the trainer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.megatron.shared_rank import SharedRankPlan, SharedRankStaging
from tests.trainer.megatron.models import save_model
from trainer.megatron.inference.model import CachedModel
from trainer.ranks.publication import Publication
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.part_layout import blank_manifest
from trainer.weights.shared_parts import SharedPartSender


@dataclass
class Rank:
    """The only rank of trainer and engine, in one process."""

    model: CachedModel
    masters: dict[str, torch.Tensor]
    sender: SharedPartSender
    plan: SharedRankPlan
    staging: SharedRankStaging

    def publish(self, version: int) -> WeightManifest:
        names = [piece.tensor for part in self.model.published() for piece in part]
        pieces = [piece for piece in self.model.pieces(self.masters) if piece is not None]
        named = zip([list(self.model.shapes)[index] for index in names], pieces, strict=True)
        return self.sender.publish("e1", version, in_dtype(named, "bfloat16"))

    def live(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.parameters.items()}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    model_dir = save_model("qwen2", tmp_path / "model")
    model = CachedModel(model_dir, dtype="bfloat16", running=1, length=16)
    generator = torch.Generator().manual_seed(0)
    masters = {
        name: torch.nn.Parameter(torch.randn(tensor.shape, generator=generator), requires_grad=False)
        for name, tensor in model.parameters.items()
    }
    parts = tuple(map(tuple, model.published()))
    publication = Publication(tuple(model.shapes), tuple(model.shapes.values()), parts)
    sender = SharedPartSender(
        tmp_path, 0, blank_manifest(publication, "bfloat16", 1 << 20, "shared"), masters
    )
    plan = SharedRankPlan(model, 0)
    yield Rank(model, masters, sender, plan, plan.staging(architecture="", tied=False))
    sender.close()
    model.close()


def is_live(rank: Rank) -> bool:
    live = rank.live()
    return all(torch.equal(live[name], master.bfloat16()) for name, master in rank.masters.items())


def test_a_version_is_converted_from_the_masters_and_has_the_digest_that_was_published(rank: Rank) -> None:
    manifest = rank.publish(3)
    before = rank.live()
    rank.staging.fetch(manifest, 30.0)
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())
    rank.staging.take(manifest)
    rank.plan.apply()
    assert is_live(rank)
    assert rank.staging.staged is None
    found = {name: tensor for name, tensor, complete in rank.plan.gathered() if complete}
    pieces = [piece for piece in rank.model.pieces(rank.masters) if piece is not None]
    assert sum(tensor.numel() for tensor in found.values()) == sum(piece.numel() for piece in pieces)


def test_masters_that_changed_after_they_were_published_are_refused_by_name(rank: Rank) -> None:
    manifest, before = rank.publish(3), rank.live()
    name = next(name for name in rank.masters if "linear_proj" in name)
    rank.masters[name].view(-1)[0] += 1
    with pytest.raises(WeightError, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.weight: rank 0"):
        rank.staging.fetch(manifest, 30.0)
    assert rank.staging.staged is None
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())


def test_sums_that_are_not_those_of_the_manifest_are_refused_by_name(rank: Rank) -> None:
    manifest = rank.publish(3)
    entry = manifest.tensors[2]
    changed = [*manifest.tensors]
    changed[2] = msgspec.structs.replace(entry, digest=entry.digest ^ 1)
    with pytest.raises(WeightError):
        rank.staging.fetch(msgspec.structs.replace(manifest, tensors=tuple(changed)), 30.0)
    assert rank.staging.staged is None


def test_a_version_whose_masters_are_written_to_is_not_committed(rank: Rank) -> None:
    manifest, before = rank.publish(3), rank.live()
    rank.staging.fetch(manifest, 30.0)
    rank.sender.invalidate()
    with pytest.raises(WeightError, match="version 3 is not held by the trainer any more"):
        rank.staging.take(manifest)
    with pytest.raises(WeightError, match="version 3 is not held by the trainer any more"):
        rank.staging.fetch(manifest, 30.0)
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())


def test_a_trainer_that_divides_the_model_in_another_way_is_refused(rank: Rank) -> None:
    manifest = rank.publish(3)
    part = manifest.parts[0]
    halves = tuple(
        msgspec.structs.replace(part, pieces=pieces) for pieces in (part.pieces[:1], part.pieces[1:])
    )
    with pytest.raises(WeightError, match="2 ranks that divide the model in another way"):
        rank.staging.fetch(msgspec.structs.replace(manifest, parts=halves), 30.0)
