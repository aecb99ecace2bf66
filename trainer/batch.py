"""Defines a training batch: the groups of one step as padded tensors, the same on every rank.

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
    """int64 [N]: tokens of prompt and response."""
    loss_mask: torch.Tensor
    """bool [N, L]: sampled tokens within the bound; only they carry gradient."""
    sampled_mask: torch.Tensor
    """bool [N, L]: all sampled tokens."""
    behaviour_logprobs: torch.Tensor
    """float32 [N, L]: under the weights that sampled each token, set by the engine; 0 where not sampled."""
    versions: torch.Tensor
    """int32 [N, L]: version of each sampled token; -1 elsewhere."""
    advantages: torch.Tensor
    """float32 [N, L]: 0 where `loss_mask` is False."""
    group_index: torch.Tensor
    """int64 [N]: index of the sample's group within the batch."""
    rewards: torch.Tensor
    """float32 [N]: reward of each sample."""
    temperature: float = 1.0
    """Sampling temperature of the behaviour policy; logits are divided by it before the log-softmax."""
    proximal_logprobs: torch.Tensor | None = None
    """float32 [N, L]: recomputed by the trainer before the step, for the decoupled objective; else None."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [N, L]: under the initial model, for the KL term; else None."""
    measured: torch.Tensor | None = None
    """bool [N]: samples whose mismatch of trainer and engine is measured; None: all."""


UNHASHED = ("proximal_logprobs", "reference_logprobs", "measured")
"""Fields that the trainer adds itself, which a batch's digest leaves out."""


def part_of(batch: Batch, samples: torch.Tensor, device: torch.device) -> Batch:
    """Return the `samples` (int64 [n]) of a batch on the device, cut to the longest of them."""
    width = max(2, int(batch.sequence_lengths[samples].max()))
    parts: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            rows = value[samples]
            parts[field.name] = (rows[:, :width] if rows.ndim == 2 else rows).to(device)
    return dataclasses.replace(batch, **parts)  # type: ignore[arg-type]


def batch_digest(batch: Batch) -> str:
    """Return the xxh3-128 of a batch, 32 hex digits.

    It covers every number and every tensor with its name, dtype, shape and bytes, in order. What the trainer
    adds itself (`UNHASHED`) is left out, so the same records give the same digest.
    """
    state = xxhash.xxh3_128()
    for field in dataclasses.fields(batch):
        if field.name in UNHASHED:
            continue
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            state.update(f"{field.name} {value.dtype} {list(value.shape)}\n".encode())
            state.update(value.contiguous().numpy().data)
        else:
            state.update(f"{field.name} {value!r}\n".encode())
    return state.hexdigest()
