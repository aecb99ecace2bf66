"""Divides a replica's samples into passes, and builds the inputs of each pass: packed, or padded rows.

Packed samples of a group share their common prefix, see `PrefixTree`.

Every pass is a collective, because the ranks gather each layer's parameters on demand. All ranks therefore
run the same number of passes. Shapes: t tokens of a micro-batch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.data.context_division import Division
from trainer.data.packing import pack_families, pack_padded
from trainer.data.prefix_tree import PrefixTree, RowFamily, batch_families, single_row_families
from trainer.fsdp import attention
from trainer.layers.attention.sequences import token_positions
from trainer.layers.attention.visible import (
    ComputedTokens,
    VisibleKeys,
    pieces_with_padding,
    to_device,
    visible_keys,
)
from trainer.memory.expected import FIRST_TOKENS
from trainer.memory.oom_retry import OomRetry
from trainer.reference.logprobs import padded
from trainer.reference.shards import DATA

log = logging.getLogger("tether.trainer")

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sample of a pass; each sample is then a pass of its
own."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Samples that one pass computes."""

    samples: torch.Tensor
    """int64 [n]: sample indices, ascending."""
    tree: PrefixTree | None
    """Prefix tree of the packed inputs; None: padded rows."""
    starts: torch.Tensor
    """int64 [n]: for each row of the tree, start of its sample in the concatenated samples."""
    tokens: int
    """Computed tokens, including padding; 0 without samples."""
    padding: int
    row_tokens: int
    """Input tokens of all samples; a shared prefix counts for each sample."""

    @classmethod
    def padded(cls, samples: list[int], lengths: torch.Tensor) -> "Pass":
        """Return a pass over padded rows of samples; `samples` may be empty."""
        chosen = torch.tensor(sorted(samples), dtype=torch.int64)
        own = lengths[chosen]
        total = int(own.sum())
        tokens = int(own.max()) * len(own) if len(own) else 0
        return cls(chosen, None, own.cumsum(0) - own, tokens, tokens - total, total)

    @classmethod
    def packed(cls, families: Sequence[RowFamily], lengths: torch.Tensor) -> "Pass":
        """Return a pass over families of samples; `families` may be empty."""
        rows = torch.tensor([row for family in families for row in family.rows], dtype=torch.int64)
        samples, places = rows.sort()
        own, starts = lengths[samples], torch.empty_like(rows)
        starts[places] = own.cumsum(0) - own
        tokens = sum(family.tokens for family in families)
        row_tokens = sum(sum(family.lengths) for family in families)
        return cls(samples, PrefixTree.of(families), starts, tokens, 0, row_tokens)


RESET = "reset_iter_state"
"""Method of FSDP2 modules that drops the state of an interrupted pass."""
NO_SAMPLES = torch.zeros(0, dtype=torch.int64)
NO_ROWS, NO_STRETCHES = Pass.padded([], NO_SAMPLES), Pass.packed([], NO_SAMPLES)
"""Passes without samples, of ranks that have fewer than others."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a transformers model for one pass."""

    arguments: dict[str, torch.Tensor]
    rows: torch.Tensor
    """int64 [t]: index of the input before each token of the micro-batch, over all inputs."""


class Passes:
    """Layout of a model's batches: distribution of samples over passes, packed or padded."""

    def __init__(self, model: Any, mesh: DeviceMesh, trainer: TrainerConfig, why_rows: str) -> None:
        """Create the layout; `why_rows` is the reason for padded rows, empty for packing."""
        self.device, self._mesh, self._trainer = torch.device(mesh.device_type), mesh, trainer
        self.micro_batch_tokens = trainer.micro_batch_tokens or FIRST_TOKENS[mesh.device_type]
        """Token budget of a pass, reduced after running out of memory."""
        self._max_rows = 1 if _rope_types(model) & set(BY_LENGTH) else trainer.micro_batch_size
        self.why_rows = why_rows
        """Why samples are rows with right padding; empty if samples are packed."""
        if self.why_rows:
            log.warning("trainer.rows model=%s reason=%r", type(model).__name__, self.why_rows)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a common prefix of samples in a group is computed once."""
        return self._trainer.share_prefixes == "auto" and not self.why_rows and self._max_rows > 1

    def divide(self, batch: Batch) -> list[Pass]:
        """Return the passes over a batch on the host; the last passes may be empty. A collective."""
        own, empty = self._own(batch), NO_ROWS if self.why_rows else NO_STRETCHES
        most = torch.tensor([len(own)], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._mesh.get_group(DATA))
        return own + [empty] * (int(most) - len(own))

    def sampled(self, batch: Batch, compute: Callable[[Pass, Batch], torch.Tensor]) -> torch.Tensor:
        """Return the results of `compute` for sampled tokens, 0 elsewhere: float32 [t], on the CPU.

        A collective. `compute` receives its samples on the device.
        """
        out = torch.zeros(len(batch.tokens))
        for one in self.divide(batch):
            found = compute(one, batch.select(one.samples).to(self.device))
            out[batch.sampled_mask & torch.isin(batch.sample_index, one.samples)] = found.cpu()
        return out

    def counts(self, batch: Batch) -> list[tuple[int, int]]:
        """Return (samples, tokens) of each pass of this rank over a batch."""
        return [(len(one.samples), one.tokens) for one in self._own(batch)]

    def _own(self, batch: Batch) -> list[Pass]:
        budget = self.micro_batch_tokens
        if self.why_rows:
            rows = pack_padded(batch.lengths.tolist(), budget, self._max_rows)
            return [Pass.padded(samples, batch.lengths) for samples in rows]
        families = (
            batch_families(batch)
            if self.shares_prefixes
            else single_row_families((batch.lengths - 1).tolist())
        )
        packed = pack_families(families, budget, max_rows=self._max_rows)
        return [Pass.packed(one, batch.lengths) for one in packed]

    @contextmanager
    def inputs(self, forward_pass: Pass, part: Batch) -> Iterator[Inputs]:
        """Yield the inputs of a pass; its backward pass must end within the block.

        Args:
            part: samples of the pass, on the device; an empty pass computes one token.
        """
        if forward_pass.tree is not None:
            with self._stretches(forward_pass, forward_pass.tree, part) as inputs:
                yield inputs
        elif len(forward_pass.samples):
            ids, sample, position = padded(part)
            yield Inputs({"input_ids": ids}, sample * ids.size(1) + position - 1)
        else:
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            yield Inputs({"input_ids": ids}, forward_pass.samples.to(self.device))

    @contextmanager
    def _stretches(self, forward_pass: Pass, tree: PrefixTree, part: Batch) -> Iterator[Inputs]:
        """Yield the concatenated stretches of a tree, at the positions of their samples."""
        division = Division.of(tree.lengths, 1)
        computed = ComputedTokens.of(forward_pass.starts, tree, division, 0)
        lengths, keys = stretches_of(tree)
        tokens = to_device(computed.tokens, self.device)
        ids = torch.zeros(1, division.size, dtype=torch.int64, device=self.device)
        ids[0, : len(tokens)] = part.tokens[tokens].long()
        positions = to_device(token_positions(lengths, keys), self.device)
        rows = to_device(computed.predictors(len(part.tokens)), self.device)
        with attention.packed(lengths, self.device, keys):
            yield Inputs({"input_ids": ids, "position_ids": positions[None]}, rows)


def make_retry(passes: Passes, mesh: DeviceMesh, reset: Callable[[], None]) -> OomRetry:
    """Return the retry policy of passes after running out of memory; `reset` as in `OomRetry`.

    Ranks gather parameters from each other in every pass, so only a single rank can abandon a pass. Without
    `reset_iter_state`, as in torch 2.11, no rank can: FSDP2 keeps the state of the interrupted pass.
    """
    replicas, can_abort = mesh[DATA].size(), mesh.size() == 1 and hasattr(FSDPModule, RESET)
    return OomRetry(passes.device, passes.micro_batch_tokens, reset, replicas=replicas, can_abort=can_abort)


def forget_pass(root: torch.nn.Module) -> None:
    """Drop the state of an interrupted pass, including the gradients of gathered parameters."""
    for parameter in root.parameters():
        parameter.grad = None
    if hasattr(root, RESET):
        getattr(root, RESET)()


def stretches_of(tree: PrefixTree) -> tuple[list[int], VisibleKeys | None]:
    """Return the length of each stretch of a tree, and the visible keys if stretches share prefixes."""
    division = Division.of(tree.lengths, 1)
    lengths = [piece.tokens for piece in pieces_with_padding(division, 0)]
    return lengths, visible_keys(division, 0, tree) if tree.is_shared else None


def _rope_types(model: Any) -> set[str]:
    """Return the types of a model's rotary embeddings; some models have one per kind of layer."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    by_layer = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {parameters.get("rope_type", "") for parameters in by_layer}
