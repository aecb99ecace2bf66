"""Tests where frozen models lie, and that the reference of adapters is their base and no copy."""

from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from tests.trainer.megatron.models import OPTIMIZER, make_batch, save_model
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import Backend, FrozenModel, FrozenSpec, reference_is_copy
from trainer.backends.scripted import ScriptedBackend
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.reference.backend import ReferenceBackend
from trainer.roles.models import FrozenModels, LocalFrozenModel, RankModels

TRAINER = TrainerConfig(device="cpu", micro_batch_size=7)
NEAR = AlgorithmConfig(kl_coef=0.1)


def make(kind: str, model_dir: Path, adapters: LoraConfig = NO_ADAPTERS) -> Backend:
    options = {"optimizer": OPTIMIZER, "trainer": TRAINER, "algorithm": make_algorithm(NEAR)}
    if kind == "megatron":
        return MegatronBackend(model_dir, parallel=ParallelConfig(), adapters=adapters, **options)  # type: ignore[arg-type]
    return ReferenceBackend(model_dir, adapters=adapters, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["reference", "megatron"])
def test_the_reference_of_adapters_is_their_base_and_takes_no_memory(kind: str, tmp_path: Path) -> None:
    backend, batch = make(kind, save_model("qwen2", tmp_path), LoraConfig(rank=4)), make_batch("qwen2", 0)
    before, moved = backend.logprobs(batch), backend.offload()
    backend.onload()
    backend.keep_reference()
    assert backend.offload() == moved
    backend.onload()
    for step in range(2):
        backend.train_step(make_batch("qwen2", step))
    assert torch.equal(backend.reference_logprobs(batch), before)
    assert not torch.equal(backend.logprobs(batch), before)  # the adapters are on again
    backend.close()


@pytest.mark.parametrize("kind", ["reference", "megatron"])
def test_without_adapters_the_reference_is_a_copy(kind: str, tmp_path: Path) -> None:
    backend, batch = make(kind, save_model("qwen2", tmp_path)), make_batch("qwen2", 0)
    before, moved = backend.logprobs(batch), backend.offload()
    backend.onload()
    backend.keep_reference()
    assert backend.offload() > moved
    backend.onload()
    backend.train_step(batch)
    assert torch.equal(backend.reference_logprobs(batch), before)
    backend.close()


@pytest.mark.parametrize(
    ("config", "adapters", "roles", "copy"),
    [
        (AlgorithmConfig(), NO_ADAPTERS, (), False),
        (NEAR, NO_ADAPTERS, (), True),
        (NEAR, NO_ADAPTERS, ("teacher",), True),
        (NEAR, NO_ADAPTERS, ("reference",), False),
        (NEAR, LoraConfig(rank=2), (), False),
    ],
)
def test_a_copy_is_kept_only_where_nothing_else_is_the_reference(
    config: AlgorithmConfig, adapters: LoraConfig, roles: tuple[str, ...], copy: bool
) -> None:
    specs = [FrozenSpec(role, Path("elsewhere")) for role in roles]
    assert reference_is_copy(config, adapters, specs) == copy


def make_constant() -> FrozenModel:
    """Make one that says the same of every token, and fails unless its one tensor is on the device."""
    tensor = torch.full((3,), -2.0)
    return FrozenModel(lambda batch: torch.full((len(batch.tokens),), float(tensor.sum())), [tensor])


def is_here(model: FrozenModel) -> bool:
    return model.tensors[0].untyped_storage().nbytes() > 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_frozen_model_rests_where_the_setting_says(offload: bool) -> None:
    model = make_constant()
    role = LocalFrozenModel(model, torch.device("cpu"), offload=offload)
    models = RankModels(ScriptedBackend(trainer=TRAINER), frozen=FrozenModels(teacher=role))
    for _ in range(2):
        assert is_here(model) is not offload
        assert role.evaluate(make_batch("qwen2", 0)).unique().tolist() == [-6.0]
    models.offload()
    assert not is_here(model)
    models.onload()
    assert is_here(model) is not offload
    assert role.evaluate(make_batch("qwen2", 0)).unique().tolist() == [-6.0]


def test_a_reference_at_a_path_is_not_replaced_by_the_policy() -> None:
    role = LocalFrozenModel(make_constant(), torch.device("cpu"), offload=False)
    models = RankModels(ScriptedBackend(trainer=TRAINER), frozen=FrozenModels(reference=role))
    models.keep_reference()
    batch = make_batch("qwen2", 0)
    assert models.frozen.reference_logprobs(models.policy, batch).unique().tolist() == [-6.0]


def test_a_frozen_model_that_cannot_be_loaded_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    spec = FrozenSpec("teacher", tmp_path / "broken")
    with pytest.raises(SettingsError, match=r"teacher\.path"):
        make("reference", save_model("qwen2", tmp_path)).load_frozen(spec)
    backend = make("megatron", save_model("qwen2", tmp_path))
    with pytest.raises(SettingsError, match=r"teacher\.path"):
        backend.load_frozen(spec)
    backend.close()
    with pytest.raises(SettingsError, match=r"teacher\.path: ScriptedBackend"):
        ScriptedBackend(trainer=TRAINER).load_frozen(spec)
