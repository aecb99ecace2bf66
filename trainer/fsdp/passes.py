"""Divides a replica's samples into passes, and makes the inputs of each: packed, or padded rows.

Every pass is a collective, because the ranks gather the parameters of a layer when they come to it. So all
ranks make equally many. Shapes: t tokens of a micro-batch.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.data.packing import pack, pack_padded
from trainer.fsdp import attention
from trainer.reference.padding import padded

log = logging.getLogger("tether.trainer")

AUTO_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a pass where `trainer.micro_batch_tokens` is 0, by the kind of device."""
EXACT = 1e-4
"""Largest difference of a float32 model's outputs between packed samples and a pass for each, relative to the
largest output."""
SAMPLE = 8
"""Tokens of each of the two samples that show the difference."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sample of a pass: each sample is a pass of its own."""
NO_SAMPLES = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a transformers model for one pass."""

    arguments: dict[str, torch.Tensor]
    rows: torch.Tensor
    """int64 [t]: for each token of the micro-batch the row before it, counted over all inputs."""


class Passes:
    """Layout of a model's batches: which samples share a pass, packed or padded."""

    def __init__(self, model: Any, mesh: DeviceMesh, trainer: TrainerConfig) -> None:
        """Choose packing for a model on the CPU, in float32, if its outputs are the same then."""
        self.device, self._mesh, self._trainer = torch.device(mesh.device_type), mesh, trainer
        self._most = 1 if _rope_types(model) & set(BY_LENGTH) else trainer.micro_batch_size
        self.why_rows = _packing_refusal(model)
        """Why samples are rows of their own, padded on the right; empty where they are packed."""
        if self.why_rows:
            log.warning("trainer.rows model=%s reason=%r", type(model).__name__, self.why_rows)

    def divide(self, batch: Batch) -> list[torch.Tensor]:
        """Return the samples of each pass, int64 [n]; the last ones may have none. A collective."""
        budget = self._trainer.micro_batch_tokens or AUTO_TOKENS[self.device.type]
        divided = pack_padded if self.why_rows else pack
        passes = divided(batch.lengths.tolist(), budget, self._most)
        most = torch.tensor([len(passes)], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._mesh.get_group())
        own = [torch.tensor(sorted(samples)) for samples in passes]
        return own + [NO_SAMPLES] * (int(most) - len(own))

    def tokens(self, batch: Batch, samples: torch.Tensor) -> int:
        """Return the tokens that a pass over these samples computes, padding included."""
        lengths = batch.lengths[samples]
        if not len(lengths):
            return 0
        return int(lengths.max()) * len(lengths) if self.why_rows else int(lengths.sum())

    @contextmanager
    def inputs(self, part: Batch) -> Iterator[Inputs]:
        """Yield the inputs of a pass, whose backward pass has to end within the block.

        Args:
            part: samples, on the device; without any, one token goes through the model.
        """
        lengths = part.lengths.tolist() or [1]
        if not len(part.tokens):
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            inputs = Inputs({"input_ids": ids}, NO_SAMPLES.to(self.device))
        elif self.why_rows:
            ids, sample, position = padded(part)
            inputs = Inputs({"input_ids": ids}, sample * ids.size(1) + position - 1)
        else:
            place = torch.arange(len(part.tokens), device=self.device)
            position = place - part.offsets[part.sample_index]
            ids = part.tokens.long()[None]
            inputs = Inputs({"input_ids": ids, "position_ids": position[None]}, place - 1)
        if self.why_rows:
            yield inputs
            return
        with attention.packed(lengths, self.device):
            yield inputs


def _rope_types(model: Any) -> set[str]:
    """Return the types of a model's rotary embeddings; some models have one for each kind of layer."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    by_layer = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {parameters.get("rope_type", "") for parameters in by_layer}


def _packing_refusal(model: Any) -> str:
    """Return why a model's samples are not packed; empty after its attention was replaced.

    The outputs of two samples in one pass are compared with a pass for each. They differ if layers have a
    state that goes from one sample to the next, or attention that is not transformers' exchangeable one.
    """
    unknown = set(getattr(model.config, "layer_types", None) or ()) - attention.KNOWN_TYPES
    if unknown:
        return f"layers of the types {', '.join(sorted(unknown))}"
    before = model.config._attn_implementation
    ids = torch.arange(2 * SAMPLE) % model.config.vocab_size
    alone = torch.cat([_outputs(model, part[None]) for part in ids.split(SAMPLE)])
    try:
        model.set_attn_implementation(attention.NAME)
        with attention.packed([SAMPLE, SAMPLE], torch.device("cpu")):
            together = _outputs(model, ids[None], position_ids=torch.arange(SAMPLE).repeat(2)[None])
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        model.set_attn_implementation(before)
        return f"its attention cannot be replaced: {error}"
    difference = float((together - alone).abs().max() / alone.abs().max())
    if difference <= EXACT:
        return ""
    model.set_attn_implementation(before)
    return f"outputs of packed samples are off by {difference:.2g} of the largest"


@torch.no_grad()
def _outputs(model: Any, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **options)[0]
    return found.flatten(0, 1).double()
