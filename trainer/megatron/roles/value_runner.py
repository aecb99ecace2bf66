"""Runs megatron-core models with a value head: critics and reward models."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from trainer.megatron.forward import Finish, Runner
from trainer.megatron.micro_batches import MicroBatch


class ValueRunner(Runner):
    """Runner whose outputs are values instead of log-probabilities."""

    def _score(
        self, temperature: float, finish: Finish | None, micro: MicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self.position.sequence_parallel:  # every tensor rank computes all values
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values = self._inner[-1].value_head(hidden[:, 0].index_select(0, micro.rows))[: micro.wanted]
        loss, output = (
            (values.sum(), (micro.places, values)) if finish is None else finish(micro.trained, values)
        )
        return loss, torch.zeros((), dtype=torch.int32, device=hidden.device), output
