"""A training batch: the groups of one step as padded tensors, the same on every rank.

Shapes: N samples, L tokens of the longest sequence (prompt and response), padded on the right.
"""

import dataclasses
from dataclasses import dataclass

import torch
import xxhash


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step. `x[:, i]` belongs to token i of the sequence; position 0 is never trained."""

    step: int
    """The version that the step starts from."""
    tokens: torch.Tensor
    """int64 [N, L]; 0 where padded."""
    sequence_lengths: torch.Tensor
    """int64 [N]: prompt and response."""
    loss_mask: torch.Tensor
    """bool [N, L]: sampled tokens within the bound; only they carry gradient."""
    sampled_mask: torch.Tensor
    """bool [N, L]: all sampled tokens."""
    behaviour_logprobs: torch.Tensor
    """float32 [N, L]: as the engine sampled them; 0 where not sampled."""
    versions: torch.Tensor
    """int32 [N, L]: version of each sampled token; -1 elsewhere."""
    advantages: torch.Tensor
    """float32 [N, L]: 0 where `loss_mask` is False."""
    group_index: torch.Tensor
    """int64 [N]: index of the sample's group within the batch."""
    rewards: torch.Tensor
    """float32 [N]."""
    temperature: float = 1.0
    """At which the behaviour policy sampled; logits are divided by it before the log-softmax."""
    proximal_logprobs: torch.Tensor | None = None
    """float32 [N, L]: recomputed by the trainer before the step (decoupled objective)."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [N, L]: under the initial model, for the KL term."""


def batch_digest(batch: Batch) -> str:
    """xxh3-128 (32 hex digits) over a batch: every number and every tensor with its name, dtype, shape and
    bytes, in order.

    Log-probabilities that the trainer computes itself are left out, so a batch has one digest, whoever builds
    it from the same records.
    """
    state = xxhash.xxh3_128()
    for field in dataclasses.fields(batch):
        if field.name in ("proximal_logprobs", "reference_logprobs"):
            continue
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            state.update(f"{field.name} {value.dtype} {list(value.shape)}\n".encode())
            state.update(value.contiguous().numpy().data)
        else:
            state.update(f"{field.name} {value!r}\n".encode())
    return state.hexdigest()
