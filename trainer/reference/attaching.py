"""Validates an engine's buffers: rotary frequencies, or a table of the angles that they make."""

from collections.abc import Mapping
from typing import Any

import torch

from protocol.device.shared_layout import ROTARY
from protocol.errors import SettingsError
from trainer.backends.engine_attach import check_buffers

ROWS = 4096
"""Positions whose angles are compared at a time."""


def check_model_buffers(model: Any, engine: Mapping[str, torch.Tensor]) -> None:
    """Compare the buffers that a model has computed from its config with an engine's.

    Args:
        model: of transformers.
        engine: the engine's buffers by name; one whose name ends with `ROTARY` is a table of angles.

    Raises:
        SettingsError: a buffer is not on both sides, or differs.
    """
    own = dict(model.named_buffers())
    angles = {name: tensor for name, tensor in engine.items() if name.endswith(ROTARY)}
    others = {name: tensor for name, tensor in engine.items() if name not in angles}
    check_buffers({name: own[name] for name in own.keys() & others.keys()} if angles else own, others)
    for name, tensor in angles.items():
        _check_angles(model, name, tensor)


@torch.no_grad()
def _check_angles(model: Any, name: str, table: torch.Tensor) -> None:
    """Compare a table [positions, rotary dimension], cos then sin of every angle, with the model's angles."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        raise SettingsError(
            f"buffer {name} of the engine: the trainer's model has no rotary embedding to compare it with"
        )
    half = table.shape[1] // 2
    like = torch.empty(0, dtype=torch.float32, device=table.device)
    for start in range(0, len(table), ROWS):
        rows = table[start : start + ROWS].float()
        positions = torch.arange(start, start + len(rows), device=table.device)[None]
        cos, sin = (values[0] for values in rotary(like, positions))
        if cos.shape[1] != table.shape[1]:
            raise SettingsError(
                f"buffer {name}: for {table.shape[1]} dimensions in the engine, for {cos.shape[1]} in the "
                "trainer"
            )
        # one rounding of the table's dtype, and a few of an angle of up to so many radians: a GPU's powers
        # differ from the host's in those
        bound = 2 * torch.finfo(table.dtype).eps + 8 * (start + len(rows)) * torch.finfo(torch.float32).eps
        difference = float((rows - torch.cat([cos[:, :half], sin[:, :half]], dim=1)).abs().max())
        if not difference <= bound:
            raise SettingsError(
                f"buffer {name}: the engine's rotary angles are {difference:g} from those that the "
                "model's config makes"
            )
