"""Tests that masters and moments are the same numbers in another layout, and that a run resumes there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.weights.lora import NO_ADAPTERS
from tests.changes import slow_unless_changed
from tests.trainer.checkpoints import save_part
from tests.trainer.megatron.layout_runs import Runs, marks_of
from tests.trainer.megatron.layouts import BACK, FROM, restored_in
from tests.trainer.megatron.models import step_batch
from tests.trainer.megatron.ranks import make_backend
from trainer.config import ParallelConfig
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.reading import CheckpointReader, read_description
from trainer.megatron.convert.reshard import narrow_rows
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Grid, Layout, Place

pytestmark = pytest.mark.xdist_group("layouts")  # what `runs` sets up once, not one for each process
MOVED = slow_unless_changed("trainer/megatron/", "trainer/optimizers/", "trainer/storage/", "trainer/ranks/")

EACH_MOVE = pytest.mark.parametrize(
    ("source", "layout", "saved", "model"),
    [
        pytest.param(source, layout, saved, model, marks=[*marks_of(layout), *marks_of(source)])
        for layout, sources in {**FROM, "single": BACK}.items()
        for source in sources
        for saved, (_, model) in restored_in(source, layout).items()
    ],
)


@MOVED
@EACH_MOVE
def test_masters_and_moments_are_the_same_bits_in_another_layout(
    moves: Runs, source: str, layout: str, saved: str, model: str
) -> None:
    model_dir = moves.models / model
    before = whole_state(moves(source) / saved / "after-one", model_dir)
    after = whole_state(moves(layout) / saved / f"from-{source}", model_dir)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert before["steps"] == 1


@MOVED
@EACH_MOVE
def test_a_run_goes_on_in_another_layout_as_if_it_had_stayed(
    moves: Runs, source: str, layout: str, saved: str, model: str
) -> None:
    stayed = load_file(moves(source) / saved / "after.safetensors")
    moved = load_file(moves(layout) / saved / f"went-on-from-{source}.safetensors")
    atol, rtol = (5e-3, 1e-2) if saved in ("bfloat16", "float16") else (1e-5, 0.0)
    for name, expected in stayed.items():
        torch.testing.assert_close(moved[name], expected, atol=atol, rtol=rtol, msg=name)


def whole_state(checkpoint: Path, model_dir: Path) -> dict[str, torch.Tensor]:
    """Masters and moments by Hugging Face name, as a single rank would restore them."""
    architecture = read_architecture(model_dir)
    single = Layout.of(ParallelConfig(), architecture.layers)
    model = TrainedModel(architecture, single, "float32", NO_ADAPTERS, distributed=False)
    result = {}
    with CheckpointReader(checkpoint, read_description(checkpoint), model) as reader:
        result["steps"] = torch.tensor(reader.steps)
        shapes = {rule.parameter: rule.local_shape(Grid()) for rule in model.rules(0)}
        for kind in reader.kinds:
            flat = {
                rule.parameter: reader.flat(kind, rule, Place(), 0, 10**9).view(shapes[rule.parameter])
                for rule in model.rules(0)
            }
            for plan in model.plans().values():
                rows = [
                    narrow_rows(
                        flat[plan.parameter], plan.dim, piece.local_start, piece.length, piece.local_matrix
                    )
                    for piece in plan.pieces
                ]
                result[f"{kind} {plan.name}"] = torch.cat(rows, plan.dim)
    return result


def test_moments_of_a_rank_are_those_of_its_optimizer(runs: Runs, tmp_path: Path) -> None:
    """What `whole_state` reads, without the code that wrote it."""
    backend = make_backend(runs.models / "qwen2", "single")
    backend.train_step(step_batch("qwen2", 0))
    save_part(backend, tmp_path)
    state = whole_state(tmp_path, runs.models / "qwen2")
    held = {id(parameter): name for name, parameter in backend._parameters.items()}
    (adam,) = backend._optimizer.torch_optimizers
    found = {held[id(parameter)]: values for parameter, values in adam.state.items()}
    backend.close()
    for kind in ("exp_avg", "exp_avg_sq"):
        norm = found["decoder.layers.1.input_layernorm.weight"][kind]
        assert torch.equal(state[f"{kind} model.layers.1.input_layernorm.weight"], norm)
        gate_up = found["decoder.layers.1.mlp.linear_fc1.weight"][kind]
        names = [f"{kind} model.layers.1.mlp.{half}_proj.weight" for half in ("gate", "up")]
        assert torch.equal(torch.cat([state[name] for name in names]), gate_up)
