"""Computes log-probabilities and entropies from hidden states, through the output layer.

Shapes: k tokens, H hidden size, V vocabulary, P tensor ranks; V' is V padded.
"""

import torch
import torch.distributed as dist

from trainer.megatron.layers.vocab_parallel import vocab_parallel_logprobs


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    rank: int = 0,
    size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target, and the entropy of the distribution that it is from, nats.

    Every rank of the group gets the same result, and in the backward pass its own share of the gradient of
    `hidden`: the caller adds up the shares.

    Args:
        hidden: [k, H], equal on every rank of the group.
        weight: [V' / P, H], rank r's rows of the output layer.
        targets: int64 [k] in [0, V).
        vocabulary: V, without padding.
        temperature: at which the tokens were sampled; positive.
        rank: this tensor rank.
        size: number of tensor ranks.
        group: their process group; not needed with one.

    Returns:
        float32 [k] log-probabilities and float32 [k] entropies; gradients flow through both.
    """
    return vocab_parallel_logprobs(
        hidden @ weight.t(),
        targets,
        vocabulary=vocabulary,
        temperature=temperature,
        rank=rank,
        size=size,
        group=group,
    )
