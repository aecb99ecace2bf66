"""Computes gradients and log-probabilities where samples begin alike, sharing tokens or not."""

from pathlib import Path

import torch

from tests.trainer.megatron.ranks import ALGORITHM, part_of, whole, write
from trainer.batch import Batch
from trainer.fsdp.backend import FsdpBackend
from trainer.reference.shards import gathered
from trainer.step.measures import StepMeasures


def write_results(backend: FsdpBackend, batch: Batch, out: Path) -> None:
    """Write gradients, log-probabilities and the counts of a step; a collective."""
    part = part_of(backend, batch)
    measures = StepMeasures.of_batch(part, ALGORITHM.config)
    for one in backend._model.passes.divide(part):
        backend._accumulate(one, part.select(one.samples).to(backend.device), measures)
    gradients = {name: gathered(p.grad) for name, p in backend._trained.items() if p.grad is not None}
    backend._stepper.optimizer.zero_grad()
    logprobs = whole(backend, batch, backend.logprobs)
    stats = backend.train_step(part)
    counts = torch.tensor([stats.shared_share, stats.padding_share, stats.computed_tokens])
    write(out, [*gradients.items(), ("logprobs", logprobs), ("counts", counts)])
