"""Creates the optimizer `optimizer.name`, or a user's optimizer by `MODULE:NAME`.

    class Mine(torch.optim.Optimizer):
        def __init__(self, groups: list[dict], *, lr: float, ...): ...
    def mine(groups: list[dict], *, lr: float, ...) -> torch.optim.Optimizer: ...

`groups` contain the float32 masters (`params`) and their `weight_decay`. `[optimizer] options` are additional
keyword arguments. docs/own_code.md describes them. torch is imported when an optimizer is created.
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
    """Return the optimizer of float32 parameters. Vectors (norms and biases) have no weight decay.

    Args:
        masters: tensors to update, by name.
        config: section `[optimizer]`.
        embeddings: masters of the embedding and the output layer.

    Raises:
        SettingsError: the optimizer is unknown or not installed, does not support a parameter, or a user's
            optimizer cannot be created.
    """
    entry = OPTIMIZERS.find(config.name, "setting optimizer.name:")
    optimizer: torch.optim.Optimizer = load(entry.path)(masters, config, embeddings)
    return optimizer
