"""Tests training with the weights of an engine of the same layers, and when Megatron refuses it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from protocol.device.shared_tensors import map_tensors
from protocol.errors import SettingsError, WeightError
from protocol.weights.lora import LoraConfig
from rollout.staging.shared_weights import SharedStaging, describe, share_parameters
from rollout.staging.staging import digest_of, whole_source
from tests.changes import slow_unless_changed
from tests.trainer.attached import Tensors, assert_lies_in_shared_memory, change
from tests.trainer.checkpoints import save_part
from tests.trainer.megatron.attached import Place, exported, same_bits
from tests.trainer.megatron.models import MODELS, make_batch
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.inference.model import CachedModel
from trainer.megatron.model import DTYPES
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.shared import SharedSender

NAME = "qwen2"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FREQUENCIES = "rotary_pos_emb.inv_freq"
ALWAYS = "bfloat16"
CHANGED = slow_unless_changed(
    "trainer/megatron/", "trainer/weights/shared", "trainer/optimizers/", "rollout/staging/", "trainer/lora",
    "protocol/device/shared_tensors", "tests/trainer/megatron/",
)  # fmt: skip
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[] if dtype == ALWAYS else CHANGED) for dtype in DTYPES]
)


def commit(backend: MegatronBackend, engine: CachedModel) -> None:
    """What the engine does with a version."""
    live = engine.slices()
    for name, part in backend.master_parts().items():
        live[name][1].copy_(part)


def saved(backend: MegatronBackend, directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    save_part(backend, directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) == (NAME, ALWAYS) else CHANGED)
        for name in MODELS
        for dtype in DTYPES
    ],
)
def test_steps_with_an_engines_weights_are_those_with_ones_own(place: Place, name: str, dtype: str) -> None:
    alone, attached, engine = (
        place.trainer(name, dtype, shared=False),
        place.trainer(name, dtype),
        place.engine(name, dtype),
    )
    attached.attach(engine.parameters, engine.buffers())
    for step in range(3):
        assert alone.train_step(make_batch(name, step)) == attached.train_step(make_batch(name, step))
        commit(attached, engine)
    assert torch.equal(alone.logprobs(make_batch(name)), attached.logprobs(make_batch(name)))
    own = exported(alone)
    assert same_bits(own, {name: tensor.to(DTYPES[dtype]) for name, tensor in exported(attached).items()})
    assert same_bits(own, dict(attached.export_model()))
    assert saved(alone, place.directory / "alone") == saved(attached, place.directory / "attached")


@EACH_DTYPE
def test_adapters_are_trained_on_an_engines_base_that_stays(place: Place, dtype: str) -> None:
    alone, attached = (place.trainer(dtype=dtype, shared=False, adapters=LoraConfig(rank=4)) for _ in "ab")
    engine = place.engine(dtype=dtype)
    live = digest_of(engine.base)
    attached.attach(engine.base, engine.buffers())
    for name, parameter in attached._parameters.items():
        assert parameter.data_ptr() == engine.base[name].data_ptr()
    for step in range(3):
        assert alone.train_step(make_batch(NAME, step)) == attached.train_step(make_batch(NAME, step))
    assert same_bits(exported(alone), exported(attached))
    assert same_bits(dict(alone.export_model()), dict(attached.export_model()))
    assert digest_of(engine.base) == live
    saved(attached, place.directory / "saved")
    attached.restore(place.directory / "saved")
    assert digest_of(engine.base) == live


def test_another_base_than_the_adapters_is_refused(place: Place) -> None:
    backend, engine = place.trainer(shared=False, adapters=LoraConfig(rank=4)), place.engine()
    engine.base[QKV].data[0, 0] += 1
    with pytest.raises(WeightError, match=f"parameter {QKV}: the weights that the engine serves"):
        backend.attach(engine.base, engine.buffers())


@EACH_DTYPE
def test_a_step_writes_to_masters_alone(place: Place, dtype: str) -> None:
    backend, engine = place.trainer(dtype=dtype), place.engine(dtype=dtype)
    backend.attach(engine.parameters, engine.buffers())
    live = digest_of(engine.parameters)
    before = exported(backend)
    backend.train_step(make_batch(NAME, 0))
    assert digest_of(engine.parameters) == live
    assert not same_bits(before, exported(backend))
    saved(backend, place.directory / "saved")  # of the new version, although the engine serves the old one
    held = load_file(place.directory / "saved" / "rank-00000.safetensors")
    assert all(
        torch.equal(held[f"master/{name}/0"], master.view(-1)) for name, master in backend.masters().items()
    )


@EACH_DTYPE
def test_a_checkpoint_goes_on_with_and_without_an_engine(place: Place, dtype: str) -> None:
    """A successor restores and replays before there is an engine to attach to."""
    alone, unattached = place.trainer(dtype=dtype, shared=False), place.trainer(dtype=dtype)
    unattached.keep_reference()
    reference = unattached.reference_logprobs(make_batch(NAME))
    for step in range(2):
        assert alone.train_step(make_batch(NAME, step)) == unattached.train_step(make_batch(NAME, step))
    found = saved(unattached, place.directory / "at-two")
    assert found == saved(alone, place.directory / "alone-at-two")
    last = alone.train_step(make_batch(NAME, 2))

    successor, engine = place.trainer(dtype=dtype), place.engine(dtype=dtype)
    successor.restore(place.directory / "at-two")
    assert successor.train_step(make_batch(NAME, 2)) == last
    successor.restore(place.directory / "at-two")
    commit(successor, engine)
    successor.attach(engine.parameters, engine.buffers())
    assert successor.train_step(make_batch(NAME, 2)) == last
    assert same_bits(exported(alone), dict(successor.export_model()))
    assert torch.equal(unattached.reference_logprobs(make_batch(NAME)), reference)

    live = digest_of(engine.parameters)
    successor.restore(place.directory / "at-two")  # the engine alone writes to its weights
    assert digest_of(engine.parameters) == live
    assert saved(successor, place.directory / "again") == found


@EACH_DTYPE
def test_a_version_is_committed_out_of_the_masters_and_has_the_digest_of_any_transport(
    place: Place, dtype: str
) -> None:
    backend, alone, engine = (
        place.trainer(dtype=dtype),
        place.trainer(dtype=dtype, shared=False),
        place.engine(dtype=dtype),
    )
    room, buffers = share_parameters(engine.module, engine.buffers())
    describe(room, place.directory / "e.msgpack", engine.parameters, buffers)
    found = map_tensors(place.directory / "e.msgpack")
    sender = SharedSender(place.directory, backend.masters(), backend.master_parts)
    backend.attach(found["parameters"], found["buffers"])
    staging = SharedStaging(
        {
            name: replace(whole_source(part), shape=engine.shapes[name])
            for name, (_, part) in engine.slices().items()
        }
    )
    for version in range(1, 3):
        sender.invalidate()
        assert backend.train_step(make_batch(NAME, version)) == alone.train_step(make_batch(NAME, version))
        manifest = sender.publish("e1", version, in_dtype(backend.export(), dtype))
        assert manifest.digest == digest_of(exported(alone))
        staging.fetch(manifest, 30)
        staging.take(manifest)
        staging.apply()
        staging.check_live(manifest)
        assert all(
            torch.equal(engine.parameters[name], master.to(DTYPES[dtype]))
            for name, master in backend.masters().items()
        )
    assert torch.equal(backend.logprobs(make_batch(NAME)), alone.logprobs(make_batch(NAME)))
    sender.close()
    room.close()


def test_an_engine_of_other_layers_finds_the_tensor_that_lies_otherwise(place: Place) -> None:
    backend = place.trainer()
    sender = SharedSender(place.directory, backend.masters(), backend.master_parts)
    staging = SharedStaging(
        {name: whole_source(torch.zeros(tensor.shape)) for name, tensor in backend.export()}
    )
    with pytest.raises(
        WeightError,
        match=r"tensor model\.layers\.0\.self_attn\.q_proj\.weight is interleaved with others in the trainer",
    ):
        staging.fetch(sender.publish("e1", 1, backend.export()), 30)
    assert staging.staged is None
    sender.close()


@EACH_DTYPE
def test_an_attached_model_lies_where_the_engine_has_it_and_nowhere_else(place: Place, dtype: str) -> None:
    backend, engine = place.trainer(dtype=dtype), place.engine(dtype=dtype)
    own = [StorageWeakRef(parameter.untyped_storage()) for parameter in backend._parameters.values()]
    room, buffers = share_parameters(engine.module, engine.buffers())
    describe(room, place.directory / "e.msgpack", engine.parameters, buffers)
    found = map_tensors(place.directory / "e.msgpack")
    backend.attach(found["parameters"], found["buffers"])
    assert_lies_in_shared_memory(backend._runner.chunks[0].module)
    assert all(storage.expired() for storage in own)
    room.close()


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (
            change(0, QKV, lambda t: None),
            SettingsError,
            f"parameter {QKV}: the trainer's model has it, the engine does not",
        ),
        (
            change(0, "lm_head.weight", lambda t: t),
            SettingsError,
            "parameter lm_head.weight: the engine has it, the trainer's model does",
        ),
        (
            change(0, QKV, lambda t: t.detach().bfloat16()),
            SettingsError,
            f"parameter {QKV}: dtype torch.bfloat16 in the engine",
        ),
        (
            change(0, QKV, lambda t: t.detach()[1:]),
            SettingsError,
            f"parameter {QKV}: shape [255, 64] in the engine",
        ),
        (
            change(0, QKV, lambda t: t.detach().T.contiguous().T),
            SettingsError,
            f"parameter {QKV}: strides (1, 256) in the engine",
        ),
        (
            change(0, QKV, lambda t: t.detach().nextafter(torch.tensor(9.0))),
            WeightError,
            f"parameter {QKV}: the weights that the engine serves",
        ),
        (
            change(1, FREQUENCIES, lambda t: None),
            SettingsError,
            f"buffer {FREQUENCIES}: the trainer's model has it",
        ),
        (
            change(1, FREQUENCIES, lambda t: t * 1.01),
            SettingsError,
            f"buffer {FREQUENCIES}: the engine's values are not those",
        ),
    ],
)
def test_tensors_that_differ_are_named_and_nothing_changes(
    place: Place, changed: Callable[[tuple[Tensors, Tensors]], None], kind: type[Exception], said: str
) -> None:
    backend, alone, engine = place.trainer(), place.trainer(shared=False), place.engine()
    places = {name: parameter.data_ptr() for name, parameter in backend._parameters.items()}
    tensors = dict(engine.parameters), engine.buffers()
    changed(tensors)
    with pytest.raises(kind) as error:
        backend.attach(*tensors)
    assert said in str(error.value)
    assert {name: parameter.data_ptr() for name, parameter in backend._parameters.items()} == places
    assert backend.train_step(make_batch(NAME)) == alone.train_step(make_batch(NAME))
    assert torch.equal(backend.logprobs(make_batch(NAME)), alone.logprobs(make_batch(NAME)))


def test_setting_incompatible_with_sharing_is_refused(place: Place) -> None:
    with pytest.raises(SettingsError, match=r"weights\.transport.*does not share weights"):
        place.trainer(shared=False).masters()
    with pytest.raises(SettingsError, match="stays where the engine reads it"):
        place.trainer().offload()
