"""Tests that layers in FP8 train as those in bfloat16 do, but for rounding, and that nothing else changes.

On a CPU torch multiplies in FP8, too, slowly. `make .venv-fp8/.ready` sets up the environment with torchao.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from rollout.staging.staging import digest_of
from services.audit.versions import read_version
from tests.changes import slow_unless_changed
from tests.trainer.checkpoints import save_part
from tests.trainer.fsdp.tiny_models import save_tiny
from tests.trainer.layers.fp8_ranks import STEPS, on_policy
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import make_batch, save_model, step_batch
from tests.trainer.megatron.ranks import ALGORITHM
from tests.trainer.megatron.trees import make_tree
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig, WeightConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.fsdp.critic import FsdpCritic
from trainer.layers.fp8 import is_multiplied, use_fp8
from trainer.reference.shards import local_tensor
from trainer.roles.config import CriticConfig
from trainer.weights.publish import publish
from trainer.weights.registry import make_sender

TORCHAO = [
    pytest.mark.skipif(find_spec("torchao") is None, reason="make .venv-fp8/.ready has torchao"),
    slow_unless_changed("trainer/fsdp/", "trainer/layers/fp8.py", "deploy/locks/fp8.txt"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["tensorwise", "rowwise"]
MODELS = ["qwen2", "qwen3-moe"]
OPTIMIZER = OptimizerConfig(lr=2e-3, clip_grad=0.0)
Make = Callable[..., FsdpBackend]


def with_torchao(test: Any) -> Any:
    for mark in TORCHAO:
        test = mark(test)
    return test


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes backends of models by their names, which are closed in the end."""
    made = []

    def backend(name: str, fp8: str = "rowwise", **trainer: Any) -> FsdpBackend:
        if not (tmp_path / name).exists():
            save_model(name, tmp_path)
        settings = {"dtype": "bfloat16", "device": "cpu", "micro_batch_tokens": 40, "fp8": fp8, **trainer}
        made.append(
            FsdpBackend(
                tmp_path / name,
                parallel=ParallelConfig(),
                optimizer=replace(OPTIMIZER, cpu_offload="offload_parameters" in trainer),
                trainer=TrainerConfig(backend="fsdp", **settings),
                algorithm=ALGORITHM,
            )
        )
        return made[-1]

    yield backend
    for one in reversed(made):  # the first one has the group
        one.close()


def gradient_of(backend: FsdpBackend, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients of a step, which are zeroed in the end."""
    found: dict[str, torch.Tensor] = {}
    step = backend._stepper.step

    def keep(scale: float = 1.0) -> tuple[float, str]:
        found.update({name: whole(p.grad).float().cpu() for name, p in backend._trained.items()})
        return step(scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._stepper, "step", keep)
        backend.train_step(on_policy(backend, batch))
    return found


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


@pytest.mark.parametrize(
    ("name", "shape", "is_so"),
    [
        ("model.layers.0.self_attn.q_proj", (64, 32), True),
        ("model.layers.0.mlp.gate_proj", (96, 32), True),
        ("model.layers.0.mlp.shared_expert.up_proj", (48, 32), True),
        ("model.layers.0.mlp.gate", (128, 32), False),
        ("model.layers.0.block_sparse_moe.router.layer", (64, 32), False),
        ("model.layers.0.mlp.experts.3.up_proj", (64, 32), False),
        ("model.layers.0.self_attn.q_proj", (64, 24), False),
        ("model.layers.0.mlp.shared_expert_gate", (1, 32), False),
    ],
)
def test_routers_experts_and_odd_sides_stay_as_they_are(
    name: str, shape: tuple[int, int], is_so: bool
) -> None:
    layer = torch.nn.Linear(shape[1], shape[0])
    assert is_multiplied(layer, name) == is_so
    assert not is_multiplied(layer.requires_grad_(False), name)
    assert not is_multiplied(torch.nn.Conv1d(16, 16, 1), name)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        SettingsError, match=r'trainer\.fp8: .*pip install "tether-rl\[fp8\]"; remove the setting'
    ):
        use_fp8(torch.nn.Linear(16, 16), TrainerConfig(fp8="rowwise"), "cpu")


@with_torchao
def test_an_old_gpu_and_a_model_without_such_layers_are_refused(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("gpt2", tmp_path)
    with pytest.raises(SettingsError, match="GPT2LMHeadModel has no layer that supports FP8"):
        make("gpt2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(SettingsError, match=r"capability 8\.9 or more, and this one has 8\.6"):
        use_fp8(make("qwen2", "off")._model.module, TrainerConfig(fp8="rowwise"), "cuda")


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_close_to_those_in_bfloat16(make: Make, model: str, recipe: str, device: str) -> None:
    batch = make_batch(model, 0)
    plain, own = make(model, "off", device=device), make(model, recipe, device=device)
    apart = (own.logprobs(batch) - plain.logprobs(batch))[batch.sampled_mask].abs()
    assert 0 < apart.mean() < 0.2
    expected, found = gradient_of(plain, batch), gradient_of(own, batch)
    flat = [torch.cat([tensor.flatten() for tensor in one.values()]) for one in (found, expected)]
    assert torch.cosine_similarity(*flat, 0) > 0.97
    assert 0.95 < flat[0].norm() / flat[1].norm() < 1.05


@with_torchao
@pytest.mark.parametrize("model", MODELS)
def test_layers_are_replaced_and_parameters_are_not(make: Make, model: str) -> None:
    from torchao.float8.float8_linear import Float8Linear

    plain, own = make(model, "off"), make(model)
    replaced = {name for name, one in own._model.module.named_modules() if isinstance(one, Float8Linear)}
    linear = {name for name, one in plain._model.module.named_modules() if type(one) is torch.nn.Linear}
    assert linear - replaced == {"lm_head"}
    assert replaced >= {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}
    same = [
        (name, tensor.dtype, tensor.shape, torch.equal(tensor, dict(plain.export())[name]))
        for name, tensor in own.export()
    ]
    assert all(dtype == torch.bfloat16 and equal for _, dtype, _, equal in same)
    assert {name: p.dtype for name, p in own._trained.items()} == {n: torch.float32 for n in plain._trained}


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_sampled_tokens_become_likelier(make: Make, recipe: str) -> None:
    backend, batch = make("qwen2", recipe), make_batch("qwen2", 0)
    batch = replace(batch, advantages=batch.loss_mask.float())
    means = []
    for _ in range(6):
        batch = on_policy(backend, batch)
        means.append(float(batch.behaviour_logprobs[batch.loss_mask].mean()))
        backend.train_step(batch)
    assert means[-1] > means[0] + 0.1


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_equal_steps_give_equal_bits_as_do_layers_computed_again_and_offloading(
    make: Make, recipe: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with `run.deterministic`."""
    if device == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    batch = make_batch("qwen3-moe", 0)
    settings = ({}, {}, {"recompute_granularity": "full"}, {"offload_parameters": True})
    first, *others = (gradient_of(make("qwen3-moe", recipe, device=device, **one), batch) for one in settings)
    torch.use_deterministic_algorithms(False)
    assert [name for one in others for name in one if not torch.equal(one[name], first[name])] == []


@with_torchao
def test_scales_of_rows_are_not_those_of_samples_beside_them(make: Make) -> None:
    """The scale of a whole tensor is the largest number's of the pass."""
    batch = make_batch("qwen2", 0)
    alone, apart = batch.select(torch.tensor([0])), {}
    for recipe in RECIPES:
        backend = make("qwen2", recipe, share_prefixes="off", micro_batch_tokens=200)
        beside = backend.logprobs(batch)[: len(alone.tokens)]
        apart[recipe] = float((backend.logprobs(alone) - beside).abs().max())
    assert apart["rowwise"] < 0.01 < apart["tensorwise"]


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_skips_the_step(make: Make, recipe: str, wrong: float) -> None:
    """Rounding bounds finite numbers, and these alone."""
    backend = make("qwen2", recipe)
    weight: Any = backend._trained["model.layers.0.mlp.down_proj.weight"]
    local_tensor(weight.detach())[3, 5] = wrong
    assert backend.train_step(make_batch("qwen2", 0)).skipped == "the gradient's norm is nan"


@with_torchao
def test_shared_tokens_give_what_rows_give_but_for_rounding(make: Make) -> None:
    tree = make_tree("qwen2", 0)
    shared, rows = (make("qwen2", share_prefixes=share).logprobs(tree) for share in ("auto", "off"))
    assert (shared - rows)[tree.sampled_mask].abs().mean() < 0.02


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_versions_are_masters_in_bfloat16(make: Make, recipe: str, tmp_path: Path) -> None:
    backend = make("qwen2", recipe)
    backend.train_step(step_batch("qwen2", 0))
    config = WeightConfig(transport="disk", directory=str(tmp_path / "files"), bucket_mb=1)
    sender = make_sender(config, backend, "bfloat16", run="r", run_dir=tmp_path, rank=0)
    assert sender is not None
    manifest = publish(backend, sender, "e1", 1, "bfloat16")
    masters = {name: whole(p.detach()).bfloat16() for name, p in backend._trained.items()}
    assert manifest is not None
    assert manifest.digest == digest_of(masters)
    found = read_version(manifest, 60)
    assert all(torch.equal(tensor, masters[name].float()) for name, tensor in found.items())
    sender.close()


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_is_continued_bit_for_bit(make: Make, recipe: str, tmp_path: Path) -> None:
    first, directory = make("qwen2", recipe), tmp_path / "after-one"
    directory.mkdir()
    first.train_step(step_batch("qwen2", 0))
    save_part(first, directory)
    first.train_step(step_batch("qwen2", 2))
    expected = {name: whole(p.detach()) for name, p in first._trained.items()}
    for fp8 in (recipe, "off"):
        other = make("qwen2", fp8)
        other.restore(directory)
        other.train_step(step_batch("qwen2", 2))
        same = all(torch.equal(whole(p.detach()), expected[name]) for name, p in other._trained.items())
        assert same == (fp8 == recipe)


@with_torchao
def test_a_critic_is_trained_in_fp8(make: Make, tmp_path: Path) -> None:
    from torchao.float8.float8_linear import Float8Linear

    policy = make("qwen2")
    critic = FsdpCritic.on_policy_ranks(
        policy,
        tmp_path / "qwen2",
        optimizer=OPTIMIZER,
        trainer=policy._trainer,
        config=CriticConfig(lr=1e-2),
    )
    assert any(isinstance(module, Float8Linear) for module in critic._model.modules())
    batch = make_batch("qwen2", 0)
    sizes = torch.ones(len(batch.tokens))
    batch = replace(batch, returns=sizes, values=0 * sizes)
    means = [critic.train_step(batch).value_mean or 0.0 for _ in range(6)]
    assert means[0] == 0 < means[-1]
    assert not torch.equal(critic.values(batch), 0 * sizes)


@with_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_train_as_one_does_and_publish_their_shards(
    make: Make, recipe: str, tmp_path: Path
) -> None:
    backend = make("qwen2", recipe, micro_batch_size=7)
    batches = [step_batch("qwen2", step) for step in range(STEPS)]
    norms = [backend.train_step(on_policy(backend, batch)).grad_norm for batch in batches]
    out = tmp_path / "out"
    arguments = ("fsdp-2", recipe, str(tmp_path / "qwen2"), str(out))
    launch(2, "tests.trainer.layers.fp8_ranks", *arguments, logs=tmp_path / "logs")
    found = json.loads((out / "norms-0.json").read_text())
    assert found == json.loads((out / "norms-1.json").read_text())
    assert found == pytest.approx(norms, rel=0.2)
    assert load_file(out / "after.safetensors").keys() == dict(backend.export()).keys()
