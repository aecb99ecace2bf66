"""Tests the shapes that a stage of the interleaved schedule expects; test_layouts.py runs the schedule."""

from trainer.megatron.forward import interleaved_shapes

SHAPES = [(size,) for size in (5, 7, 11, 13)]


def sizes(*, is_first: bool = False, is_last: bool = False) -> tuple[list[int], list[int]]:
    found = interleaved_shapes(SHAPES, stages=2, chunks=2, is_first=is_first, is_last=is_last)
    activations, gradients = ([size for (size,) in part] for part in found)
    return activations, gradients


def test_a_stage_receives_groups_of_micro_batches_for_each_of_its_chunks() -> None:
    everything = [5, 7, 5, 7, 11, 13, 11, 13]
    assert sizes() == (everything, everything)


def test_the_first_stage_has_no_activation_for_its_first_chunk_nor_the_last_a_gradient_for_its_last() -> None:
    around = [5, 7, 11, 13]
    assert sizes(is_first=True)[0] == around
    assert sizes(is_last=True)[1] == around
