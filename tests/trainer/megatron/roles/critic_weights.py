"""Gathers the weights of a critic of the megatron backend."""

from collections.abc import Iterator

import torch

from trainer.megatron.convert.export import Exporter
from trainer.megatron.families.stages import export_plan
from trainer.megatron.model import DTYPES
from trainer.megatron.roles.critic import MegatronCritic


@torch.no_grad()
def critic_export(critic: MegatronCritic) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the trained tensors on rank 0, as `Backend.export` does."""
    part, dtype = critic._part, DTYPES[critic._trainer.dtype]
    exporter = Exporter(part.layout, part.position, dtype, critic._parameters.__getitem__)
    yield from exporter.gathered(export_plan(part.spec, part.layout))
