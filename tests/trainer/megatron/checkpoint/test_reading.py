"""Tests that what ranks of any layout saved is read in any other one as if it were loaded from the source."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from tests.changes import slow_unless_changed
from tests.trainer.megatron.families.test_stages import fill, numbered
from tests.trainer.megatron.models import save_model
from trainer.megatron.checkpoint.description import (
    KINDS,
    LAYOUT,
    STEPS,
    VALUE,
    TrainedModel,
    part_name,
    rank_file,
)
from trainer.megatron.checkpoint.reading import CheckpointReader, read_description
from trainer.megatron.convert.rules import Rule
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Layout

NAMES = ("qwen2", "qwen2-tied", "qwen3-tied", "phi3")
LAYERS = 4
LAYOUTS = (
    Layout(stages=((range(LAYERS),),)),
    Layout(tp=2, stages=((range(LAYERS),),)),
    Layout(dp=3, stages=((range(3),), (range(3, LAYERS),))),
    Layout(tp=2, cp=2, dp=2, stages=((range(1),), (range(1, LAYERS),))),
    Layout(dp=2, stages=((range(1), range(2, 3)), (range(1, 2), range(3, LAYERS)))),
)
"""Stages of unequal length, and virtual ones, among them."""


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Architecture]:
    root = tmp_path_factory.mktemp("models")
    return {name: replace(read_architecture(save_model(name, root)), layers=LAYERS) for name in NAMES}


def source_of(model: TrainedModel) -> dict[str, torch.Tensor]:
    if not model.adapters.rank:
        return numbered(model.architecture)
    shapes = {plan.name: plan.shape for plan in model.plans().values()}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def kinds_of(rule: Rule) -> tuple[str, ...]:
    """As if the last norm were not stepped."""
    return (VALUE,) if rule.parameter.endswith("final_layernorm.weight") else KINDS


def wanted(rule: Rule, source: dict[str, torch.Tensor], layout: Layout, rank: int, kind: str) -> torch.Tensor:
    """What a rank has of a parameter, flat; a moment has the numbers of the master plus its own."""
    number = layout.number_of(layout.place_of(rank), expert=rule.expert)
    plain = fill(rule, source, layout, number).flatten()
    return torch.where(plain != 0, plain + kinds_of(rule).index(kind), plain).float()


def write(directory: Path, model: TrainedModel, source: dict[str, torch.Tensor], cut: float) -> None:
    """Write as the ranks would: copies divide each parameter at `cut`, or only the first of them writes."""
    layout = model.layout
    (directory / LAYOUT).write_text(json.dumps(model.as_json()))
    for rank in range(layout.stage_ranks * layout.pp):
        place = layout.place_of(rank)
        tensors = {STEPS: torch.tensor(7)}
        for rule in model.rules(place.pp):
            number = layout.number_of(place, expert=rule.expert)
            first = place.pp * layout.stage_ranks
            copies = [
                other
                for other in range(first, first + layout.stage_ranks)
                if layout.number_of(layout.place_of(other), expert=rule.expert) == number
            ]
            which, count = copies.index(rank), len(copies)
            for kind in kinds_of(rule):
                flat = wanted(rule, source, layout, rank, kind)
                ends = [int(len(flat) * (turn + cut) / (count + cut)) for turn in range(count)]
                start = ends[which - 1] if which else 0
                stop = ends[which] if which < count - 1 else len(flat)
                if not model.distributed or kind == VALUE:
                    start, stop = 0, len(flat) if rank == layout.holder_of(place.pp, number) else 0
                if start < stop:
                    tensors[part_name(kind, rule.parameter, start)] = flat[start:stop].clone()
        save_file(tensors, directory / rank_file(rank))


@slow_unless_changed("trainer/megatron/", "trainer/storage/", "tests/trainer/megatron/")
@settings(max_examples=25)
@given(data=st.data())
def test_every_range_is_read_in_every_layout(
    architectures: dict[str, Architecture], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    architecture = architectures[data.draw(st.sampled_from(NAMES))]
    there, here = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(LAYOUTS))
    lora = LoraConfig(rank=3, target_modules=("o_proj", "down_proj"))
    adapters = data.draw(st.sampled_from([NO_ADAPTERS, lora]))
    saved = TrainedModel(architecture, there, "float32", adapters, distributed=data.draw(st.booleans()))
    source = source_of(saved)
    directory = tmp_path_factory.mktemp("checkpoint")
    write(directory, saved, source, data.draw(st.floats(0.1, 3)))
    model = replace(saved, layout=here, distributed=False)
    with CheckpointReader(directory, read_description(directory), model) as reader:
        assert reader.steps == 7
        rank = data.draw(st.integers(0, here.stage_ranks * here.pp - 1))
        place = here.place_of(rank)
        for rule in model.rules(place.pp):
            for kind in kinds_of(rule):
                expected = wanted(rule, source, here, rank, kind)
                start = data.draw(st.integers(0, len(expected) - 1))
                stop = data.draw(st.integers(start + 1, len(expected)))
                found = reader.flat(kind, rule, place, start, stop)
                assert torch.equal(found[start:stop], expected[start:stop]), rule.parameter


def opened(directory: Path, model: TrainedModel) -> CheckpointReader:
    return CheckpointReader(directory, read_description(directory), model)


def test_a_checkpoint_without_one_range_or_of_another_model_is_refused(
    architectures: dict[str, Architecture], tmp_path: Path
) -> None:
    model = TrainedModel(architectures["qwen2"], LAYOUTS[2], "float32", NO_ADAPTERS, distributed=True)
    write(tmp_path, model, source_of(model), 0.5)
    opened(tmp_path, model).__exit__(None, None, None)
    with pytest.raises(SettingsError, match=r"another model: model\.hidden is 64 .* and 65 in the run"):
        opened(tmp_path, replace(model, architecture=replace(model.architecture, hidden=65)))
    with pytest.raises(SettingsError, match="lora is None in the checkpoint"):
        opened(tmp_path, replace(model, adapters=LoraConfig(rank=2)))
    (tmp_path / rank_file(4)).rename(tmp_path / "aside")
    with pytest.raises(SettingsError, match=r"lacks .*rank-00004\.safetensors: it is incomplete"):
        opened(tmp_path, model)
    save_file({STEPS: torch.tensor(7)}, tmp_path / rank_file(4))
    with pytest.raises(SettingsError, match=r"lacks a part of master of .* \(stage 1, part 0 .*incomplete"):
        opened(tmp_path, model)
    (tmp_path / LAYOUT).write_text('{"format": 0}')
    with pytest.raises(SettingsError, match=r"layout\.json is of format 0; this tether reads 1"):
        opened(tmp_path, model)
    (tmp_path / LAYOUT).write_text('{"format": 1, "model": {}')
    with pytest.raises(SettingsError, match=r"cannot read .*layout\.json"):
        opened(tmp_path, model)
