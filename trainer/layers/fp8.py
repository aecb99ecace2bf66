"""Replaces linear layers of a transformers model by FP8 layers of torchao.

In every forward and backward pass, the factors of matrix products (inputs, weights and output gradients) are
rounded to 8 bits with scales computed from the current values. Stored weights, all-gathers and reductions
keep their precision. Torch is imported only when layers are replaced, because every start runs the refusals.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from protocol.errors import SettingsError
from trainer.config import TrainerConfig

log = logging.getLogger("tether.trainer")

CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU with FP8 matrix products."""
NEEDS_GPU = "FP8 is computed on a GPU of compute capability {}.{} or more".format(*CAPABILITY)
SIDE = 16
"""Both sides of an FP8 matrix must be multiples of this number."""
LEFT_OUT = frozenset({"experts", "gate", "router"})
"""Name components of layers that are not replaced. Rounding in a router changes the chosen experts, and an
expert without tokens has no scale."""


def fp8_refusals(trainer: TrainerConfig, *, on_gpu: bool) -> Iterator[str]:
    """Yield reasons why `trainer.fp8` is not supported here. Does not read the GPU's compute capability."""
    if trainer.fp8 == "off":
        return
    if find_spec("torchao") is None:
        yield 'torchao is not installed for this Python: pip install "tether-rl[fp8]"'
    if not on_gpu:
        yield f"{NEEDS_GPU}, and the trainer is on a CPU"


def use_fp8(model: Any, trainer: TrainerConfig, device_type: str) -> None:
    """Replace linear layers of an unsharded model by FP8 layers with the same parameters.

    Raises:
        SettingsError: torchao is missing, the GPU is too old, or no layer can be replaced.
    """
    for why in _refusals(trainer, device_type):
        raise SettingsError(f"setting trainer.fp8: {trainer.fp8!r}: {why}; remove the setting")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # optional

    output, names = model.get_output_embeddings(), list[str]()

    def is_convertible(module: Any, name: str) -> bool:
        if module is output or not is_multiplied(module, name):
            return False
        names.append(name)
        return True

    # the weight gradient sums over the tokens of a pass, whose number need not be a multiple of SIDE
    config = replace(Float8LinearConfig.from_recipe_name(trainer.fp8), pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_convertible)
    if not names:
        kind = type(model).__name__
        raise SettingsError(f"setting trainer.fp8: {kind} has no layer that supports FP8; remove the setting")
    log.info("trainer.fp8 layers=%d recipe=%s", len(names), trainer.fp8)


def is_multiplied(module: Any, name: str) -> bool:
    """Return whether the layer `name` is computed in FP8. The output layer must be excluded by the caller."""
    import torch

    if type(module) is not torch.nn.Linear or LEFT_OUT & {*name.split(".")}:
        return False
    return module.weight.requires_grad and all(side % SIDE == 0 for side in module.weight.shape)


def _refusals(trainer: TrainerConfig, device_type: str) -> Iterator[str]:
    """Yield reasons why the device cannot use FP8. A CPU can, slowly; `tether check` refuses a CPU."""
    import torch

    yield from fp8_refusals(trainer, on_gpu=True)
    if device_type == "cuda" and (found := torch.cuda.get_device_capability()) < CAPABILITY:
        yield f"{NEEDS_GPU}, and this one has {found[0]}.{found[1]}"
