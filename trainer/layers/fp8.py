"""Has layers of a transformers model multiply their matrices in FP8, by torchao.

Factors of a product are rounded to 8 bits with scales that are computed of them in every pass, forward and
backward: inputs, weights, and gradients of outputs. All that is kept, gathered and added up is as without.
Torch is imported when layers are replaced: every start is checked with the refusals.
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
"""Least compute capability of a GPU that multiplies in FP8."""
NEEDS_GPU = "FP8 is computed on a GPU of compute capability {}.{} or more".format(*CAPABILITY)
SIDE = 16
"""Divides both sides of a matrix that a GPU multiplies in FP8."""
LEFT_OUT = frozenset({"experts", "gate", "router"})
"""Parts of the names of layers that stay as they are: small changes choose other experts, and an expert may
have no token to compute a scale of."""


def fp8_refusals(trainer: TrainerConfig, *, on_gpu: bool) -> Iterator[str]:
    """Yield reasons why `trainer.fp8` is not computed here; the capability of a GPU is not read."""
    if trainer.fp8 == "off":
        return
    if find_spec("torchao") is None:
        yield 'torchao is not installed for this Python: pip install "tether-rl[fp8]"'
    if not on_gpu:
        yield f"{NEEDS_GPU}, and the trainer is on a CPU"


def use_fp8(model: Any, trainer: TrainerConfig, device_type: str) -> None:
    """Replace layers of a model that is not sharded yet by such ones with the same parameters.

    Raises:
        SettingsError: torchao is missing, the GPU is too old, or no layer can be replaced.
    """
    for why in _refusals(trainer, device_type):
        raise SettingsError(f"setting trainer.fp8: {trainer.fp8!r}: {why}; leave it out")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # optional

    output, names = model.get_output_embeddings(), list[str]()

    def suits(module: Any, name: str) -> bool:
        if module is output or not is_multiplied(module, name):
            return False
        names.append(name)
        return True

    # a pass has any number of tokens, along which the gradient of a weight is a sum
    config = replace(Float8LinearConfig.from_recipe_name(trainer.fp8), pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=suits)
    if not names:
        kind = type(model).__name__
        raise SettingsError(f"setting trainer.fp8: {kind} has no layer that can be computed so; leave it out")
    log.info("trainer.fp8 layers=%d recipe=%s", len(names), trainer.fp8)


def is_multiplied(module: Any, name: str) -> bool:
    """Return whether a layer, if it is not the output layer, is computed in FP8; `name` is its own."""
    import torch

    if type(module) is not torch.nn.Linear or LEFT_OUT & {*name.split(".")}:
        return False
    return module.weight.requires_grad and all(side % SIDE == 0 for side in module.weight.shape)


def _refusals(trainer: TrainerConfig, device_type: str) -> Iterator[str]:
    """Yield why the device does not multiply in FP8. A CPU does, slowly, which `tether check` refuses."""
    import torch

    yield from fp8_refusals(trainer, on_gpu=True)
    if device_type == "cuda" and (found := torch.cuda.get_device_capability()) < CAPABILITY:
        yield f"{NEEDS_GPU}, and this one has {found[0]}.{found[1]}"
