"""Makes the optimizer that `optimizer.name` asks for, or one of the user by `MODULE:NAME`.

    class Mine(torch.optim.Optimizer):
        def __init__(self, groups: list[dict], *, lr: float, ...): ...
    def mine(groups: list[dict], *, lr: float, ...) -> torch.optim.Optimizer: ...

`groups` have the float32 masters (`params`) and their `weight_decay`; `[optimizer] options` are further
keyword arguments. docs/own_code.md describes them. torch is imported when an optimizer is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from protocol.choices import Entry, Registry, load
from trainer.config import OptimizerConfig

if TYPE_CHECKING:  # every reader of settings imports this module for the names
    import torch

OPTIMIZERS = Registry(
    {
        "adamw": Entry("trainer.optimizers.libraries:adamw"),
        "adamw_8bit": Entry("trainer.optimizers.libraries:adamw_8bit"),
        "muon": Entry("trainer.optimizers.libraries:muon"),
    },
    own=lambda name: Entry("trainer.optimizers.libraries:own"),
)


def make_optimizer(
    masters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, embeddings: Collection[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of float32 parameters. Weight decay leaves out vectors (norms and biases).

    Args:
        masters: tensors to step, by name.
        config: the settings.
        embeddings: the masters that are the embedding or the output layer.

    Raises:
        SettingsError: it is not known or not installed, cannot step a parameter, or an optimizer of the user
            cannot be made.
    """
    entry = OPTIMIZERS.find(config.name, "setting optimizer.name:")
    optimizer: torch.optim.Optimizer = load(entry.path)(masters, config, embeddings)
    return optimizer
