"""Tests that micro-batches hold every token that is asked for once, within the budget."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.megatron.models import make_batch
from trainer.batch import Batch
from trainer.config import ParallelConfig
from trainer.data.packing import balance
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.attention.sequences import packed_sequences
from trainer.megatron.layers.attention.terms import PLAIN
from trainer.megatron.layout import Place
from trainer.megatron.micro_batches import MicroBatch, Packing
from trainer.megatron.parallel import Position

ROTARY = Rotary(torch.ones(4))


def position(tp: int = 1, dp: int = 1, pp: int = 1) -> Position:
    config = ParallelConfig(tp, pp, dp, sequence_parallel=tp > 1)
    return Position(config, torch.device("cpu"), Place())


def micro_batches(batch: Batch, packing: Packing, place: Position, *, trained: bool) -> list[MicroBatch]:
    return list(packing.micro_batches(batch, place, [ROTARY], torch.float32, [PLAIN], trained=trained))


@settings(deadline=None, max_examples=30)
@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 5, 16]),
    budget=st.integers(1, 60),
    most=st.integers(1, 8),
    trained=st.booleans(),
)
def test_every_wanted_token_is_in_one_micro_batch_of_one_replica(
    tp: int, dp: int, budget: int, most: int, trained: bool
) -> None:
    batch, place = make_batch("qwen2", 3), position(tp, dp)
    mask = batch.loss_mask if trained else batch.sampled_mask
    seen = torch.zeros(len(batch.tokens), dtype=torch.int64)
    for piece in balance(batch.lengths.tolist(), dp):
        samples = torch.tensor(piece, dtype=torch.int64)
        part = batch.select(samples)
        origin = torch.isin(batch.sample_index, samples).nonzero()[:, 0]
        packing = Packing.of(part.lengths, place, budget, most)
        found = micro_batches(part, packing, place, trained=trained)
        assert [micro.inputs.size(1) for micro in found] == list(packing.sizes)
        for micro, chosen in zip(found, packing.samples, strict=True):
            check(part, micro, chosen, place)
            assert len(chosen) <= most
            assert len(chosen) <= 1 or int((part.lengths[list(chosen)] - 1).sum()) <= budget
            seen.index_add_(0, origin[micro.places], torch.ones_like(micro.places))
    assert torch.equal(seen, mask.long())


def check(part: Batch, micro: MicroBatch, samples: tuple[int, ...], place: Position) -> None:
    """Inputs are the samples without their last tokens; each asked-for token follows its row."""
    tokens = [part.tokens[part.offsets[s] : part.offsets[s + 1] - 1] for s in samples]
    real = sum(map(len, tokens))
    assert torch.equal(micro.inputs[0, :real], torch.cat([*tokens, part.tokens[:0]]).long())
    assert micro.inputs.size(1) % place.config.tensor_model_parallel_size == 0
    assert micro.inputs.size(1) - real < max(2, place.config.tensor_model_parallel_size + 1)
    assert len(micro.rows) == len(micro.targets) == max(1, micro.wanted)
    rows = micro.rows[: micro.wanted]
    assert torch.equal(micro.inputs[0, rows], part.tokens[micro.places - 1].long())
    assert torch.equal(micro.targets[: micro.wanted], part.tokens[micro.places].long())
    offsets = micro.sequences.offsets.tolist()
    assert offsets[-1] == micro.inputs.size(1)
    assert max(end - start for start, end in pairwise(offsets)) == micro.sequences.longest


def test_positions_begin_anew_in_every_sample() -> None:
    batch, place = make_batch("qwen2", 0), position()
    (micro,) = micro_batches(batch, Packing.of(batch.lengths, place, 8192, 100), place, trained=True)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(micro.sequences.offsets)])
    torch.testing.assert_close(micro.sequences.angles[0].cos[:, 0, 0], positions.float().cos())


def test_longrope_goes_by_the_sample_and_not_by_its_inputs() -> None:
    rotary = Rotary(torch.ones(4), 3 * torch.ones(4), original=5)
    sequences = packed_sequences([4, 5], [rotary], torch.float32, segmented=False)  # samples of 5 and 6
    angles = torch.cat([torch.arange(4), 3 * torch.arange(5)])
    torch.testing.assert_close(sequences.angles[0].cos[:, 0, 0], angles.float().cos())


def test_a_sample_over_the_budget_is_alone() -> None:
    packing = Packing.of(torch.tensor([3, 50, 4, 3]), position(), 10, 100)
    assert packing.samples == ((1,), (2, 0, 3))
    assert (packing.sizes, packing.padding) == ((49, 7), 0)


def test_sequence_parallel_padding_is_counted() -> None:
    packing = Packing.of(torch.tensor([6, 6, 5]), position(tp=4), 10, 100)
    assert (packing.sizes, packing.padding) == ((12, 4), 2)


def test_a_pipeline_has_enough_micro_batches_to_fill_its_stages() -> None:
    lengths = torch.full((64,), 101)
    assert len(Packing.of(lengths, position(), 6400, 100)) == 1
    assert len(Packing.of(lengths, position(pp=2), 6400, 100)) == 8
    assert len(Packing.of(lengths, position(pp=2), 500, 100)) == 13


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_without_samples_takes_part_with_padding(tp: int) -> None:
    batch, place = make_batch("qwen2", 0).select(torch.tensor([], dtype=torch.int64)), position(tp)
    packing = Packing.of(batch.lengths, place, 8192, 100)
    (micro,) = micro_batches(batch, packing, place, trained=True)
    assert (packing.padding, tuple(micro.inputs.shape), micro.wanted, len(micro.rows)) == (tp, (1, tp), 0, 1)
    assert micro.trained is not None
    assert len(micro.trained.place) == 0
