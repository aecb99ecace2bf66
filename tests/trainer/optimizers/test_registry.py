"""Tests each optimizer of the reference backend against its library's own over Hugging Face's model."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from protocol.errors import SettingsError
from tests.changes import slow_unless_changed
from tests.trainer.checkpoints import save_part
from tests.trainer.reference.test_backend import assert_same_bits, batch, exported, make
from trainer.config import OptimizerConfig
from trainer.optimizers.libraries import probe_optimizer
from trainer.optimizers.registry import make_optimizer

LR, DECAY = 2e-3, 0.1
STEPS = 3


OWN = """
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, groups, *, lr, beta=0.9):
        super().__init__(groups, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["seen"] = torch.zeros_like(p), 0
                state["seen"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(state["mean"].sign(), alpha=-group["lr"])

def still(groups, *, lr):
    return torch.optim.SGD(groups, lr=0.0) if lr < 0 else Frozen(groups, {"lr": lr})

class Frozen(torch.optim.Optimizer):
    def step(self, closure=None): ...

def broken(groups, *, lr):
    return "adam"

def listing(groups, *, lr):
    made = Sign(groups, lr=lr)
    made.state[made.param_groups[0]["params"][0]]["seen"] = [1]
    return made
"""
SIGN = "own_optimizer_of_test:Sign"
OTHERS = ("adamw_8bit", SIGN, "torch.optim:SGD", "torch.optim:NAdam")
CHANGED = slow_unless_changed(
    "trainer/optimizers/", "trainer/reference/", "deploy/locks/cpu.txt", "tests/trainer/optimizers/"
)


@pytest.fixture(autouse=True)
def _own_module(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path_factory.mktemp("own")
    (place / "own_optimizer_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(place))


def settings(name: str, **options: object) -> OptimizerConfig:
    return OptimizerConfig(name=name, options=options, lr=LR, weight_decay=DECAY, clip_grad=0.0)


def adam_groups(model: PreTrainedModel, chosen: Callable[[str], bool]) -> list[dict[str, object]]:
    found = [(name, p) for name, p in model.named_parameters() if chosen(name)]
    return [
        {"params": [p for _, p in found if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in found if p.ndim == 1], "weight_decay": 0.0},
    ]


def is_adamws(name: str) -> bool:
    """What Muon leaves to AdamW, by the names of the model."""
    return "embed_tokens" in name or "lm_head" in name or "norm" in name or name.endswith(".bias")


def library(name: str, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    adam = {"lr": LR, "betas": (0.9, 0.95)}
    if name == "adamw":
        return [torch.optim.AdamW(adam_groups(model, lambda _: True), **adam)]
    if name == "adamw_8bit":
        eight_bit = importlib.import_module("bitsandbytes.optim").AdamW8bit
        return [eight_bit(adam_groups(model, lambda _: True), **adam)]
    if ":" in name:
        made = importlib.import_module(name.partition(":")[0])
        return [getattr(made, name.partition(":")[2])(adam_groups(model, lambda _: True), lr=LR)]
    matrices = [p for n, p in model.named_parameters() if not is_adamws(n)]
    return [
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adam_groups(model, is_adamws), **adam),
    ]


@pytest.mark.parametrize("name", ["adamw", "muon", *(pytest.param(name, marks=CHANGED) for name in OTHERS)])
def test_three_steps_equal_the_librarys_own(name: str, model_dir: Path) -> None:
    """Bit for bit, from the same gradients, which other tests compare: Muon multiplies rounding errors."""
    backend = make(model_dir, optimizer=settings(name))
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    optimizers, parameters = library(name, model), dict(model.named_parameters())

    def step_plain(*_: object) -> None:
        for parameter, master in backend._masters.items():
            assert master.grad is not None
            parameters[parameter].grad = master.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    backend._stepper.optimizer.register_step_pre_hook(step_plain)
    before = exported(backend)
    for step in range(STEPS):
        assert backend.train_step(batch(step, seed=step)).skipped == ""
    assert_same_bits(exported(backend), {n: p.detach() for n, p in parameters.items()})
    assert all(
        not torch.equal(tensor, before[n])
        for n, tensor in exported(backend).items()
        if n.endswith("proj.weight")
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "muon"),
        ("float32", SIGN),
        *(
            pytest.param(dtype, name, marks=CHANGED)
            for dtype in ("float32", "bfloat16")
            for name in ("muon", *OTHERS)
            if (dtype, name) not in (("bfloat16", "muon"), ("float32", SIGN))
        ),
    ],
)
def test_restore_resumes_bit_for_bit(name: str, dtype: str, model_dir: Path, tmp_path: Path) -> None:
    backend, fresh = (make(model_dir, optimizer=settings(name), dtype=dtype) for _ in range(2))
    for step in range(2):
        backend.train_step(batch(step, seed=step))
    save_part(backend, tmp_path)
    fresh.restore(tmp_path)
    assert_same_bits(exported(fresh), exported(backend))
    assert fresh.train_step(batch(2, seed=2)) == backend.train_step(batch(2, seed=2))
    assert_same_bits(exported(fresh), exported(backend))


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_offloading_between_steps_changes_no_bit(name: str, model_dir: Path) -> None:
    alone, by_turns = (make(model_dir, optimizer=settings(name)) for _ in range(2))
    for step in range(2):
        alone.train_step(batch(step, seed=step))
        by_turns.train_step(batch(step, seed=step))
        by_turns.offload()
        by_turns.onload()
    assert_same_bits(exported(alone), exported(by_turns))


def test_a_checkpoint_of_another_optimizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir, optimizer=settings("muon"))
    backend.train_step(batch())
    save_part(backend, tmp_path)
    with pytest.raises(SettingsError, match=r"optimizer muon.*this trainer is"):
        make(model_dir).restore(tmp_path)


def test_moments_of_large_matrices_have_8_bits(model_dir: Path) -> None:
    backend = make(model_dir, optimizer=settings("adamw_8bit"))
    backend.train_step(batch())
    state = backend._stepper.optimizer.state
    kinds = {p.numel() >= 4096: state[p]["state1"].dtype for p in backend._masters.values()}
    assert kinds == {True: torch.uint8, False: torch.float32}


def test_muon_refuses_what_is_no_matrix() -> None:
    stack = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(SettingsError, match=r"'muon' steps matrices, and experts has the shape \(2, 3, 4\)"):
        make_optimizer({"experts": stack}, settings("muon"), [])


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(SettingsError, match=r"needs bitsandbytes.*install tether-rl\[bitsandbytes\]"):
        make_optimizer({"p": torch.nn.Parameter(torch.zeros(2))}, settings("adamw_8bit"), [])


@pytest.mark.parametrize("name", [SIGN, "torch.optim:SGD"])
def test_a_resumed_optimizer_of_the_user_continues_its_schedule(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(settings(name), lr_decay_style="linear", lr_decay_steps=8)
    backend, fresh = make(model_dir, optimizer=config), make(model_dir, optimizer=config)
    for step in range(2):
        backend.train_step(batch(step, seed=step))
    save_part(backend, tmp_path)
    fresh.restore(tmp_path)
    for made in (backend, fresh):
        made.train_step(batch(2, seed=2))
        assert made._stepper.optimizer.param_groups[0]["lr"] == pytest.approx(LR * 5 / 8)


def test_state_that_no_checkpoint_holds_is_refused(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir, optimizer=settings("own_optimizer_of_test:listing"))
    with pytest.raises(SettingsError, match=r"its state 'seen' of .* is a list.*keep tensors and numbers"):
        save_part(backend, tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "own_optimizer_of_test:Sign",
            {"beta2": 1},
            "unexpected keyword argument 'beta2'; it is called with",
        ),
        ("own_optimizer_of_test:broken", {}, "made a str, which is not a torch.optim.Optimizer"),
        ("own_optimizer_of_test:still", {}, "changed nothing in 2 steps"),
        ("torch.optim:LBFGS", {}, "LBFGS doesn't support per-parameter options"),
        ("own_optimizer_of_test:Sing", {}, "did you mean 'Sign'"),
    ],
)
def test_an_optimizer_of_the_user_that_does_not_fit_is_refused(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        probe_optimizer(settings(name, **options))


def test_an_optimizer_of_the_user_with_options_passes_the_probe() -> None:
    probe_optimizer(settings(SIGN, beta=0.5))
