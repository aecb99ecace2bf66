"""Tests training with the weights of an engine, and when the reference backend refuses it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.device.shared_tensors import SharedTensors, map_tensors
from protocol.errors import SettingsError, WeightError
from tests.trainer.attached import Tensors, assert_lies_in_shared_memory, change
from tests.trainer.checkpoints import save_part
from tests.trainer.reference.test_backend import assert_same_bits, batch, exported, make
from trainer.backends.engine_attach import check_model_buffers
from trainer.megatron.families.rope import Rope
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.reference.backend import DTYPES, ReferenceBackend


def shared(model_dir: Path, dtype: str = "float32", **trainer: object) -> ReferenceBackend:
    return make(model_dir, shared=True, dtype=dtype, **trainer)


def engine(model_dir: Path, dtype: str = "float32") -> tuple[Tensors, Tensors]:
    """What an engine that loaded the same directory describes: its parameters, and its buffers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[dtype])
    return {name: p.detach() for name, p in model.named_parameters()}, dict(model.named_buffers())


def commit(backend: ReferenceBackend, parameters: Tensors) -> None:
    """What the engine does with a version."""
    for name, master in backend.masters().items():
        parameters[name].copy_(master.detach())


def angles(
    model_dir: Path, dtype: torch.dtype = torch.float32, theta: float = 10000.0, positions: int = 64
) -> Tensors:
    """As vLLM keeps them."""
    inverse = 1.0 / theta ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)
    table = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return {
        "model.layers.0.self_attn.rotary_emb.cos_sin_cache": torch.cat([table.cos(), table.sin()], dim=1).to(
            dtype
        )
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_an_engines_weights_are_those_with_ones_own(
    model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    alone, attached = make(model_dir, dtype=dtype), shared(model_dir, dtype)
    parameters, buffers = engine(model_dir, dtype)
    attached.attach(parameters, buffers)
    for step in range(3):
        assert alone.train_step(batch(step, seed=step)) == attached.train_step(batch(step, seed=step))
        commit(attached, parameters)
    assert torch.equal(alone.logprobs(batch()), attached.logprobs(batch()))
    assert_same_bits(
        exported(alone), {name: tensor.to(DTYPES[dtype]) for name, tensor in exported(attached).items()}
    )
    assert all(tensor.dtype == DTYPES[dtype] for _, tensor in attached.export_model())
    for backend, directory in ((alone, tmp_path / "alone"), (attached, tmp_path / "attached")):
        directory.mkdir()
        save_part(backend, directory)
    files = [
        next(iter(directory.iterdir())).read_bytes()
        for directory in (tmp_path / "alone", tmp_path / "attached")
    ]
    assert files[0] == files[1]


def test_a_step_writes_to_masters_alone(model_dir: Path) -> None:
    backend = shared(model_dir)
    parameters, buffers = engine(model_dir)
    backend.attach(parameters, buffers)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    masters = {name: master.detach().clone() for name, master in backend.masters().items()}
    backend.train_step(batch())
    assert_same_bits(parameters, before)
    assert any(not torch.equal(master, masters[name]) for name, master in backend.masters().items())


def test_before_it_is_attached_a_backend_steps_with_weights_of_its_own(model_dir: Path) -> None:
    alone, unattached = make(model_dir), shared(model_dir)
    for step in range(2):
        assert alone.train_step(batch(step, seed=step)) == unattached.train_step(batch(step, seed=step))
    assert_same_bits(exported(alone), exported(unattached))


def test_an_attached_model_lies_where_the_engine_has_it(model_dir: Path, tmp_path: Path) -> None:
    backend = shared(model_dir)
    parameters, buffers = engine(model_dir)
    room = SharedTensors(list(parameters.values()))
    room.write(tmp_path / "e.msgpack", {"parameters": dict(zip(parameters, room.tensors, strict=True))})
    backend.attach(map_tensors(tmp_path / "e.msgpack")["parameters"], buffers)
    assert_lies_in_shared_memory(backend.model)
    room.close()


WEIGHT, FREQUENCIES = "model.layers.1.mlp.up_proj.weight", "model.rotary_emb.inv_freq"


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (
            change(0, WEIGHT, lambda t: None),
            SettingsError,
            f"parameter {WEIGHT}: the trainer's model has it, the engine does not",
        ),
        (
            change(0, "lm_head.bias", lambda t: t),
            SettingsError,
            "parameter lm_head.bias: the engine has it, the trainer's model does not",
        ),
        (
            change(0, WEIGHT, lambda t: t.half()),
            SettingsError,
            f"parameter {WEIGHT}: dtype torch.float16 in the engine",
        ),
        (
            change(0, WEIGHT, lambda t: t[:-1]),
            SettingsError,
            f"parameter {WEIGHT}: shape [127, 128] in the engine",
        ),
        (
            change(0, WEIGHT, lambda t: t.T.contiguous().T),
            SettingsError,
            f"parameter {WEIGHT}: strides (1, 128) in the engine",
        ),
        (
            change(0, WEIGHT, lambda t: t.nextafter(torch.tensor(9.0))),
            WeightError,
            f"parameter {WEIGHT}: the weights that the engine serves are not",
        ),
        (
            change(1, FREQUENCIES, lambda t: None),
            SettingsError,
            f"buffer {FREQUENCIES}: the trainer's model has it",
        ),
        (change(1, "x.scale", lambda t: t), SettingsError, "buffer x.scale: the engine has it"),
        (
            change(1, FREQUENCIES, lambda t: t * 1.01),
            SettingsError,
            f"buffer {FREQUENCIES}: the engine's values are not those",
        ),
        (
            change(1, FREQUENCIES, lambda t: t.bfloat16()),
            SettingsError,
            f"buffer {FREQUENCIES}: dtype torch.bfloat16",
        ),
    ],
)
def test_tensors_that_differ_are_named_and_nothing_changes(
    model_dir: Path, changed: Callable[[tuple[Tensors, Tensors]], None], kind: type[Exception], said: str
) -> None:
    backend = shared(model_dir)
    places = {name: parameter.data_ptr() for name, parameter in backend.model.named_parameters()}
    tensors = engine(model_dir)
    changed(tensors)
    with pytest.raises(kind) as error:
        backend.attach(*tensors)
    assert said in str(error.value)
    assert {name: parameter.data_ptr() for name, parameter in backend.model.named_parameters()} == places
    backend.train_step(batch())
    assert_same_bits(exported(backend), {name: p.detach() for name, p in backend.model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_rotary_angles_is_compared_with_ones_own(model_dir: Path, dtype: torch.dtype) -> None:
    backend, (parameters, _) = shared(model_dir), engine(model_dir)
    for wrong, said in (
        (angles(model_dir, dtype, theta=10500.0), "cos_sin_cache: the engine's rotary angles are"),
        (
            {name: tensor[:, 2:] for name, tensor in angles(model_dir, dtype).items()},
            "for 30 dimensions in the engine, for 32 in the trainer",
        ),
        (
            {name: tensor * float("nan") for name, tensor in angles(model_dir, dtype).items()},
            "rotary angles are nan",
        ),
    ):
        with pytest.raises(SettingsError, match=said):
            backend.attach(parameters, wrong)
    backend.attach(parameters, angles(model_dir, dtype))


def test_every_rotary_embedding_of_the_model_is_one_of_the_engines() -> None:
    whole, local = (Rotary.of(Rope(theta), 16, torch.device("cpu")).halves for theta in (1e6, 1e4))
    tables = [torch.cat(angles(torch.arange(64)), dim=1) for angles in (whole, local)]

    def check(*layers: int) -> None:
        engine = {f"layers.{i}.cos_sin_cache": tables[number] for i, number in enumerate(layers)}
        check_model_buffers({}, engine, [whole, local])

    check(1, 0)
    check(0, 1, 1)
    for same, lacking in ((0, 2), (1, 1)):
        with pytest.raises(SettingsError, match=f"no angles of number {lacking}"):
            check(same, same)


def test_a_backend_that_was_not_made_for_it_refuses(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"weights\.transport"):
        make(model_dir).masters()


def test_tensors_that_an_engine_reads_stay_on_the_device(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match="stays where the engine reads it"):
        shared(model_dir).offload()
