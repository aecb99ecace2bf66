"""Tests training with the weights of an engine of other layers, where both lay parameters out alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from tests.trainer.attached import Tensors
from tests.trainer.megatron.attached import Place, exported, same_bits
from tests.trainer.megatron.models import make_batch, save_model
from trainer.config import ParallelConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.convert.parts import parameters_in, slices_of
from trainer.megatron.convert.reshard import TensorPlan
from trainer.megatron.convert.rules import Segment
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.layout import Layout
from trainer.megatron.model import DTYPES, FREQUENCIES

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
ONE_GROUP = "qwen2-tied"
"""It has one key-value head."""


def fuse(tensors: Tensors, *, joined: bool = True, padding: int = 64) -> Tensors:
    """A checkpoint's tensors in parameters as vLLM has them.

    q, k, v and gate, up are rows of one parameter if `joined`; the vocabulary is padded.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("k_proj", "v_proj", "up_proj") and joined:
            continue
        others = {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}.get(kind, ()) if joined else ()
        names = [name, *(name.replace(kind, other) for other in others)]
        rows = [*(tensors[each] for each in names), tensor.new_zeros(padding, *tensor.shape[1:])]
        found |= zip(names, torch.cat(rows).split([len(row) for row in rows]), strict=False)
    return found


def fused(backend: MegatronBackend, *, joined: bool = True, padding: int = 64) -> tuple[Tensors, Tensors]:
    """An engine's tensors by checkpoint name, and its table of angles; see `fuse`."""
    angles = torch.arange(16.0)[:, None] * backend._buffers[FREQUENCIES]
    return fuse(dict(backend.export_model()), joined=joined, padding=padding), {
        "model.layers.0.self_attn.rotary_emb.cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1)
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_of_other_layers_shares_parameters_that_both_lay_out_alike(
    place: Place, dtype: str
) -> None:
    alone, attached = place.trainer(ONE_GROUP, dtype, shared=False), place.trainer(ONE_GROUP, dtype)
    live, angles = fused(attached)
    attached.attach(live, angles)
    first = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        QKV: "model.layers.1.self_attn.q_proj.weight",
        QKV.replace("weight", "bias"): "model.layers.1.self_attn.q_proj.bias",
        "decoder.layers.1.mlp.linear_fc1.weight": "model.layers.1.mlp.gate_proj.weight",
    }
    assert {name: attached._parameters[name].data_ptr() for name in first} == {
        name: live[tensor].data_ptr() for name, tensor in first.items()
    }
    for step in range(3):
        batch = make_batch(ONE_GROUP, step)
        assert alone.train_step(batch) == attached.train_step(batch)
        for name, part in attached.master_parts().items():  # the engine's commit
            live[name].copy_(part)
    assert torch.equal(alone.logprobs(make_batch(ONE_GROUP)), attached.logprobs(make_batch(ONE_GROUP)))
    assert same_bits(exported(alone), {name: live[name] for name in exported(alone)})


@pytest.mark.parametrize(
    ("name", "joined", "said"),
    [
        (
            "qwen2",
            True,
            "tensor model.layers.0.self_attn.q_proj.weight is interleaved with others in 2 blocks in the "
            "trainer's decoder.layers.0.self_attention.linear_qkv.weight, unlike in the engine",
        ),
        (
            ONE_GROUP,
            False,
            "tensor model.layers.0.self_attn.q_proj.weight has another layout in the trainer's decoder",
        ),
    ],
)
def test_the_first_tensor_that_an_engine_lays_out_otherwise_is_named(
    place: Place, name: str, joined: bool, said: str
) -> None:
    backend = place.trainer(name)
    places = {name: parameter.data_ptr() for name, parameter in backend._parameters.items()}
    with pytest.raises(SettingsError) as error:
        backend.attach(*fused(backend, joined=joined, padding=0))
    assert said in str(error.value)
    assert {name: parameter.data_ptr() for name, parameter in backend._parameters.items()} == places


def test_an_engine_that_lacks_a_tensor_or_rotates_otherwise_is_refused(place: Place) -> None:
    backend = place.trainer(ONE_GROUP)
    live, angles = fused(backend)
    with pytest.raises(SettingsError, match=r"cos_sin_cache: the engine's rotary angles are"):
        backend.attach(live, {name: table.flip(0) for name, table in angles.items()})
    with pytest.raises(
        SettingsError, match=r"tensor model\.norm\.weight: the trainer's model has it, the eng"
    ):
        backend.attach({name: live[name] for name in live if name != "model.norm.weight"}, angles)
    backend.attach(live, angles)


def test_a_tensor_in_unequal_turns_cannot_be_shared() -> None:
    equal = Segment("q", 0, 0, 1, 2), Segment("q", 2, 0, 5, 2), Segment("q", 4, 0, 9, 2)
    parameter = torch.arange(12)
    assert slices_of([TensorPlan("q", (6,), 0, 0, "p", equal)], {"p": parameter})["q"][1].tolist() == [
        [1, 2],
        [5, 6],
        [9, 10],
    ]
    for unequal in (Segment("q", 4, 0, 10, 2), Segment("q", 4, 0, 9, 1)):
        with pytest.raises(SettingsError, match="tensor q does not lie in equal turns in p"):
            slices_of([TensorPlan("q", (6,), 0, 0, "p", (*equal[:2], unequal))], {"p": parameter})


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_one_group_each_have_their_parts_where_an_engine_has_them(
    tmp_path: Path, rank: int
) -> None:
    model_dir = save_model("qwen2", tmp_path)  # two key-value heads
    architecture = read_architecture(model_dir)
    layout = Layout.of(ParallelConfig(tensor_model_parallel_size=2), architecture.layers)
    plans, place = export_plan(architecture, layout), layout.place_of(rank)
    own = {
        rule.parameter: torch.zeros(rule.local_shape(layout.grid(expert=rule.expert)))
        for rule in stage_rules(architecture, layout, 0)
    }
    whole = load_file(model_dir / "model.safetensors")
    found = slices_of(plans, own, layout, place)
    for name, (box, part) in found.items():
        part.copy_(whole[name][tuple(slice(*side) for side in box)])
    assert found["model.layers.0.self_attn.k_proj.weight"][0] == ((32 * rank, 32 * rank + 32), (0, 64))
    assert found["model.layers.0.self_attn.o_proj.weight"][0] == ((0, 64), (64 * rank, 64 * rank + 64))
    engine = fuse({name: part for name, (_, part) in found.items()})
    live = parameters_in(plans, own, engine, layout, place)
    assert same_bits(live, {name: own[name] for name in live})
    assert live.keys() == own.keys()
    assert live[QKV].data_ptr() == engine["model.layers.1.self_attn.q_proj.weight"].data_ptr()
