"""Makes the optimizer that `optimizer.name` asks for."""

import importlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from protocol.errors import SettingsError
from trainer.config import OptimizerConfig
from trainer.optimizers.muon import MuonWithAdamW, is_hidden_matrix

NEWTON_SCHULZ_STEPS = 5
"""Iterations that make an update of Muon orthogonal."""
STATE_KEYS = (
    *("step", "exp_avg", "exp_avg_sq"),  # adamw
    "momentum_buffer",  # muon
    *("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"),  # adamw_8bit
)
"""State that optimizers have of a parameter."""


def make_optimizer(
    masters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of float32 parameters. Weight decay leaves out vectors (norms and biases).

    Args:
        masters: tensors to step, by name.
        config: the settings.
        embeddings: the masters that are the embedding or the output layer.

    Raises:
        SettingsError: it is not installed, or cannot step a parameter.
    """
    if config.name == "adamw_8bit":
        return _eight_bit()(_groups(list(masters.values()), config), **_adam_options(config))
    if config.name != "muon":
        return torch.optim.AdamW(_groups(list(masters.values()), config), **_adam_options(config))
    for name, parameter in masters.items():
        if parameter.ndim > 2:
            raise SettingsError(
                f"setting optimizer.name: 'muon' steps matrices, and {name} has the shape "
                f"{tuple(parameter.shape)}; use adamw"
            )
    matrices = [p for p in masters.values() if is_hidden_matrix(p, embeddings)]
    hidden = {id(p) for p in matrices}
    others = [p for p in masters.values() if id(p) not in hidden]
    muon = torch.optim.Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=NEWTON_SCHULZ_STEPS,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, torch.optim.AdamW(_groups(others, config), **_adam_options(config)))


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """Return how many updates an optimizer has made."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def _groups(parameters: Collection[torch.nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _eight_bit() -> Any:
    try:
        return importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise SettingsError(
            f"setting optimizer.name: 'adamw_8bit' needs bitsandbytes, which cannot be imported ({error}); "
            "install tether-rl[bitsandbytes], or use adamw"
        ) from error
