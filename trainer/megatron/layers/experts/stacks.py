"""Makes and multiplies stacks: the matrices of a rank's experts in one parameter.

Shapes: L experts of a rank; R rows, sorted by expert.

Also the experts of gpt-oss: with biases, and a gated activation whose parts are bounded. H hidden size, F' of
the width of an expert that this rank has.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

# isort: split
from megatron.core import parallel_state as mpu

from trainer.megatron.families.experts import Experts

ALIGNED = 8
"""Sizes of bfloat16 matrices that torch's grouped product takes are multiples of it: 16 bytes."""


def stack(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of experts.

    The mark makes megatron add up its gradients over the ranks with the same experts, and step it apart.
    """
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter


def expert_products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return [R, m]; on a GPU in bfloat16 by one kernel, elsewhere expert by expert.

    Args:
        rows: [R, n], sorted by expert.
        weights: [L, m, n].
        counts: int64 [L]: rows of each expert, on the host or on the device.
    """
    aligned = not any(size % ALIGNED for size in weights.shape[1:])
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        return grouped(rows, weights, counts)
    return one_by_one(rows, weights, counts)


def grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` by torch's grouped product; the host does not wait for the device."""
    ends = counts.to(rows.device, non_blocking=True).cumsum(0).int()
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` with a product for each expert: what `grouped` must equal."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def clamped_swiglu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of [..., 2 F], in which gate and up alternate.

    The gate is bounded by `limit` above, up by it on both sides.
    """
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class ClampedExperts(torch.nn.Module):
    """This rank's experts, as the checkpoint has them: `fc1` [L, H, 2 F'], `fc2` [L, F', H], and biases.

    `fc1_bias` is [L, 2 F']. Ranks that share experts add up what they put out, so each has its part of
    `fc2_bias` [L, H] and adds that.
    """

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__()
        ranks = mpu.get_expert_tensor_parallel_world_size()
        here = experts.count // mpu.get_expert_model_parallel_world_size()
        wide, hidden = experts.intermediate // ranks, config.hidden_size
        self.experts = experts
        self.fc1 = stack(config, here, hidden, 2 * wide)
        self.fc1_bias = stack(config, here, 2 * wide)
        self.fc2 = stack(config, here, wide, hidden)
        self.fc2_bias = stack(config, here, hidden // ranks)
        before = mpu.get_expert_tensor_parallel_rank() * (hidden // ranks)
        self._around = (before, hidden - before - hidden // ranks)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute each expert's rows; arguments and result as in `LocalExperts`."""
        inner = expert_products(rows, self.fc1.transpose(1, 2), counts) + _biases_of_rows(
            self.fc1_bias, counts, rows
        )
        inner = clamped_swiglu(inner, self.experts.swiglu_limit, self.experts.swiglu_alpha)
        bias = F.pad(self.fc2_bias, self._around)
        return expert_products(inner, self.fc2.transpose(1, 2), counts) + _biases_of_rows(bias, counts, rows)


def _biases_of_rows(biases: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return for each row the bias of its expert, [R, n] of [L, n]."""
    return biases.repeat_interleave(counts.to(rows.device, non_blocking=True), 0, output_size=len(rows))
