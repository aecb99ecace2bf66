"""Tests that training passes drop adapters' inputs by PEFT's formula, and that no other pass does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protocol.weights.lora import AdapterTarget, LoraConfig
from tests.changes import slow_unless_changed
from tests.trainer.checkpoints import save_part
from tests.trainer.lora.oracle import ALGORITHM, LORA, STEPS, targets_of
from tests.trainer.lora.ranks import make_backend, run
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import (
    OPTIMIZER,
    make_batch,
    make_model,
    plain_logprobs,
    plain_loss,
    save_model,
)
from trainer.backends.base import Backend
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.lora import initial_adapter, mask_seed
from trainer.reference.backend import ReferenceBackend

pytestmark = [
    pytest.mark.xdist_group("layouts"),  # one process forks the ranks of all
    slow_unless_changed("trainer/lora.py", "trainer/reference/", "trainer/fsdp/", "trainer/megatron/layers/"),
]

DROPPED = replace(LORA, dropout=0.3)
KINDS = ["reference", "fsdp", "megatron"]


def made(kind: str, model_dir: Path, lora: LoraConfig = DROPPED, **settings: Any) -> Backend:
    if kind == "megatron":
        return make_backend("llama", model_dir, "single", lora, **settings)
    trainer = TrainerConfig(**{"micro_batch_size": 7, "device": "cpu", **settings})
    given: dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "trainer": trainer,
        "algorithm": ALGORITHM,
        "adapters": lora,
    }
    if kind == "fsdp":
        return FsdpBackend(model_dir, parallel=ParallelConfig(), **given)
    return ReferenceBackend(model_dir, **given)


class PeftLinear(torch.nn.Module):
    """A layer as PEFT's library makes it: result + lora_B(lora_A(dropout(x))) * scaling."""

    def __init__(self, base: torch.nn.Module, target: AdapterTarget) -> None:
        super().__init__()
        first = initial_adapter(target, DROPPED.rank, 0)
        self.base, self.dropout = base, torch.nn.Dropout(DROPPED.dropout).train()
        self.a, self.b = (torch.nn.Parameter(first[name]) for name in (target.a, target.b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.dropout(x) @ self.a.T @ self.b.T
        return self.base(x) + added * DROPPED.scaling


def trained_by_hand(*, whole: bool) -> dict[str, torch.Tensor]:
    """The adapter after steps on one sample, all tokens of which are an input if `whole`, or all but the
    last."""
    model, adapter = make_model("llama").requires_grad_(False), {}
    for target in targets_of("llama"):
        layer = PeftLinear(model.get_submodule(target.module), target)
        model.set_submodule(target.module, layer)
        adapter |= {target.a: layer.a, target.b: layer.b}
    betas = OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2
    optimizer = torch.optim.AdamW(
        adapter.values(), betas=betas, eps=OPTIMIZER.adam_eps, weight_decay=OPTIMIZER.weight_decay
    )
    for step in range(STEPS):
        batch = make_batch("llama", step, samples=1)
        torch.manual_seed(mask_seed(0, step, 0))

        def computed(tokens: torch.Tensor) -> Any:
            found = model(tokens if whole else tokens[:, :-1])
            if not whole:  # the last row is of no token
                found.logits = torch.cat([found.logits, found.logits[:, :1]], 1)
            return found

        optimizer.zero_grad()
        plain_loss(ALGORITHM, batch, *plain_logprobs(computed, batch)).backward()
        torch.nn.utils.clip_grad_norm_(adapter.values(), OPTIMIZER.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.lr_warmup_steps)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in adapter.items()}


def trained(backend: Backend, steps: range = range(STEPS), **batches: Any) -> dict[str, torch.Tensor]:
    for step in steps:
        backend.train_step(make_batch("llama", step, **batches))
    return {name: tensor.clone() for name, tensor in backend.export()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_pass_drops_what_the_formula_of_peft_drops(kind: str, tmp_path: Path) -> None:
    backend = made(kind, save_model("llama", tmp_path))
    found = trained(backend, samples=1)
    backend.close()
    expected = trained_by_hand(whole=kind == "reference")
    torch.testing.assert_close(found, {name: expected[name] for name in found}, atol=1e-6, rtol=0)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_alone_are_without_dropout(kind: str, tmp_path: Path) -> None:
    model_dir, batch = save_model("llama", tmp_path), make_batch("llama", 7)
    backend = made(kind, model_dir)
    trained(backend)
    save_part(backend, tmp_path)
    found = backend.logprobs(batch)
    backend.close()
    without = made(kind, model_dir, LORA)
    without.restore(tmp_path)
    assert torch.equal(without.logprobs(batch), found)
    without.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_draws_the_same_masks(kind: str, tmp_path: Path) -> None:
    backend = made(kind, save_model("llama", tmp_path))
    trained(backend, range(1))
    save_part(backend, tmp_path)
    expected = trained(backend, range(1, STEPS))
    backend.restore(tmp_path)
    torch.rand(5)
    again = trained(backend, range(1, STEPS))
    backend.close()
    assert [name for name in again if not torch.equal(again[name], expected[name])] == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_recomputed_activations_have_the_masks_of_the_first_pass(
    kind: str, device: str, tmp_path: Path
) -> None:
    model_dir, found = save_model("llama", tmp_path), []
    for granularity in ("", "full"):
        backend = made(kind, model_dir, recompute_granularity=granularity, device=device)
        found.append(trained(backend))
        backend.close()
    torch.testing.assert_close(found[1], found[0], atol=1e-6 if device == "cpu" else 1e-5, rtol=0)


@pytest.mark.slow
def test_tensor_ranks_draw_the_masks_of_one_rank(tmp_path: Path) -> None:
    model_dir, layout = save_model("qwen2", tmp_path), "tp2"
    run("single", "qwen2", model_dir, tmp_path / "single", DROPPED.dropout)
    arguments = layout, "qwen2", str(model_dir), str(tmp_path / layout), str(DROPPED.dropout)
    launch(LAYOUTS[layout].world_size, "tests.trainer.lora.ranks", *arguments, logs=tmp_path / "logs")
    found, expected = (load_file(tmp_path / name / "after.safetensors") for name in (layout, "single"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
