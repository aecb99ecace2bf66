"""Tests which layers each stage and chunk of a pipeline has, by property and against megatron-core."""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.megatron.layout import Layout
from trainer.megatron.model import pipeline_fields


def pipeline(pp: int = 1, vpp: int = 1, first: int = 0, last: int = 0) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


@st.composite
def divisible(draw: st.DrawFn) -> tuple[ParallelConfig, int]:
    """Settings that divide a model, and its layers."""
    pp, vpp = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    first, last = draw(st.integers(0, 3)) * vpp, draw(st.integers(0, 3)) * vpp
    between = pp - bool(first) - bool(last)
    return pipeline(pp, vpp, first, last), first + last + between * draw(st.integers(1, 3)) * vpp


@given(divisible())
def test_every_layer_is_in_one_chunk_and_chunks_follow_each_other(
    made: tuple[ParallelConfig, int],
) -> None:
    parallel, layers = made
    layout = Layout.of(parallel, layers)
    assert (layout.pp, layout.chunks) == (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    in_order = [layer for chunk in zip(*layout.stages, strict=True) for part in chunk for layer in part]
    assert in_order == list(range(layers))
    assert all(part for stage in layout.stages for part in stage)
    sizes = [sum(map(len, stage)) for stage in layout.stages]
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    assert sizes[0] == first or not first
    assert sizes[-1] == last or not last
    assert len(set(sizes[bool(first) : len(sizes) - bool(last)])) <= 1


@settings(deadline=None, max_examples=50)
@given(divisible())
def test_megatron_core_gives_every_chunk_the_same_layers(made: tuple[ParallelConfig, int]) -> None:
    parallel, layers = made
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=float,
        **pipeline_fields(parallel),
    )
    for stage, chunks in enumerate(Layout.of(parallel, layers).stages):
        for chunk, part in enumerate(chunks):
            number = chunk if len(chunks) > 1 else None
            start = get_transformer_layer_offset(config, number, stage)
            assert part == range(start, start + get_num_layers_to_build(config, number, stage))


def test_chunks_by_hand() -> None:
    assert Layout.of(pipeline(2, 2), 8).stages == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
    assert Layout.of(pipeline(3, 1, 1, 2), 5).stages == ((range(1),), (range(1, 3),), (range(3, 5),))


@pytest.mark.parametrize(
    ("parallel", "layers", "words"),
    [
        (pipeline(3), 8, "pipeline_model_parallel_size = 3 does not divide the model's 8 layers"),
        (pipeline(2, 3), 8, "virtual_pipeline_model_parallel_size = 3 does not divide the 4 layers of .* 0"),
        (pipeline(2, 2, 3), 7, "size = 2 does not divide the 3 layers of pipeline stage 0"),
        (pipeline(3, 1, 3), 8, "first_pipeline_stage = 3 of the model's 8 layers leave 5 to the 2 other"),
        (pipeline(2, 1, 3, 4), 8, "leave 1 to the 0 other pipeline stages: their sum must be 8"),
        (pipeline(3, 1, 3, 4), 7, "leave 0 to the 1 other pipeline stages"),
        (pipeline(2, 1, 0, 9), 8, "last_pipeline_stage = 9 of the model's 8 layers leave -1"),
        (pipeline(1, 2), 8, "virtual_pipeline_model_parallel_size = 2 with pipeline_model_parallel_size = 1"),
        (pipeline(1, 1, 8), 8, "num_layers_in_first_pipeline_stage = 8 with pipeline_model_parallel_size"),
    ],
)
def test_indivisible_layout_is_refused_with_both_numbers(
    parallel: ParallelConfig, layers: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        Layout.of(parallel, layers)
