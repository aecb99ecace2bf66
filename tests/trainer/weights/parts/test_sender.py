"""Versions that stay on the trainer's ranks: what arrives, and what is refused."""

from collections.abc import Iterator

import pytest
import torch

from protocol.weights.boxes import Box, whole
from protocol.weights.buckets import check_manifest
from protocol.weights.slices import check_parts
from rollout.staging.staging import digest_of
from tests.trainer.weights.parts.trainer_ranks import EngineRank, TrainerRanks, halves, trainer_ranks

SHAPES = {"embed": (131, 300), "q": (96, 400), "o": (400, 96), "norm": (400,), "scale": (), "none": (0, 3)}
"""Rows that share rows of the digest with others, columns, a replicated vector, a scalar, an empty one."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def of_ranks(ranks: int) -> dict[str, list[tuple[int, Box]]]:
    """Pieces as of tensor ranks: rows of q, columns of o, uneven rows of the embedding."""
    cut = -(-131 // ranks)
    rows = [((i * cut, min(131, (i + 1) * cut)), (0, 300)) for i in range(ranks)]
    return {
        "embed": list(enumerate(rows)),
        "q": list(enumerate(halves(SHAPES["q"], 0, ranks))),
        "o": list(enumerate(halves(SHAPES["o"], 1, ranks))),
        "norm": [(ranks - 1, whole(SHAPES["norm"]))],
        "scale": [(0, ())],
        "none": [(0, whole(SHAPES["none"]))],
    }


def engines(ranks: int) -> list[EngineRank]:
    """Ranks of an engine that pads the vocabulary, so that its rows are cut elsewhere."""
    cut = 136 // ranks
    found = []
    for i in range(ranks):
        boxes: dict[str, list[Box]] = {
            "embed": [((i * cut, min(131, (i + 1) * cut)), (0, 300))],
            "q": [halves(SHAPES["q"], 0, ranks)[i]],
            "o": [halves(SHAPES["o"], 1, ranks)[i]],
            "norm": [whole(SHAPES["norm"])],
            "scale": [()],
            "none": [whole(SHAPES["none"])],
        }
        found.append(EngineRank(boxes, SHAPES))
    return found


@pytest.fixture
def two() -> Iterator[TrainerRanks]:
    with trainer_ranks(of_ranks(2), SHAPES, 2) as made:
        yield made


@pytest.mark.parametrize(("trained", "served"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_every_engine_rank_gets_its_slices_and_the_digest_of_the_whole(trained: int, served: int) -> None:
    with trainer_ranks(of_ranks(trained), SHAPES, trained) as ranks:
        found = engines(served)
        for version in (1, 2):
            sent = tensors(version)
            manifest = ranks.publish("e1", version, sent)
            check_manifest(manifest)
            check_parts(manifest)
            assert manifest.digest == digest_of(sent)
            for engine in found:
                assert engine.fetch(manifest) == sum(tensor.nbytes for tensor in sent.values())
                assert engine.staging.take(manifest).digest == manifest.digest
                assert engine.holds(sent)
        for engine in found:
            engine.staging.close()
